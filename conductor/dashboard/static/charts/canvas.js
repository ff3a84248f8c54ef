// A canvas that fills its box, sharp on every screen.

// Fit the canvas to the size that its style gives it. Returns its context, cleared, and its size in CSS pixels.
export function cleared(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas, ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// Call ``over(x, y)`` while the pointer moves on the canvas, with nothing when it leaves, and ``picked(x, y)`` on a click.
export function pointed(canvas, over, picked) {
  canvas.onpointermove = (event) => over(event.offsetX, event.offsetY);
  canvas.onpointerleave = () => over();
  canvas.onclick = (event) => picked(event.offsetX, event.offsetY);
}
