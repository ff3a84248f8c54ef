"""All numbers of e4m3, and numbers between them."""

from __future__ import annotations

import torch

from moonpool.kernels.reference import FP8


def every_number() -> torch.Tensor:
    """All 256 codes of e4m3, each as itself; NaN among them."""
    return torch.arange(256).to(torch.uint8).view(FP8)


def between() -> torch.Tensor:
    """Every number of e4m3, the middle between neighbours, what lies just beside it, and what is too
    large."""
    numbers = every_number().float()
    positive = numbers[(numbers >= 0)].unique()
    middle = (positive[1:] + positive[:-1]) / 2
    beside = torch.cat((torch.nextafter(middle, positive[1:]), torch.nextafter(middle, positive[:-1])))
    some = torch.cat((positive, middle, beside, torch.tensor([448.1, 464.0, 1e30, float("inf"), 1e-30])))
    some = torch.cat((some, -some, torch.randn(1000), torch.tensor([float("nan")])))
    return torch.nn.functional.pad(some, (0, -len(some) % 64))
