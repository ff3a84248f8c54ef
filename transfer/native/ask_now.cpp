// A short request on an idle stream socket, and its reply.

#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

namespace {

// Asking again costs less than sleeping, up to about the time that it takes to wake up.
constexpr int64_t SPIN_NS = 20000;

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

// `Reply` of `wire.py`.
constexpr uint64_t HEAD = 20, PADDING_AT = 6, NBYTES_AT = 12;

// The bytes of a reply, as far as its first `came` bytes tell; at most `most`.
uint64_t wanted(const uint8_t* reply, uint64_t came, uint64_t most) {
    if (came < HEAD) return most < HEAD ? most : HEAD;
    uint16_t padding;
    uint64_t nbytes;
    memcpy(&padding, reply + PADDING_AT, sizeof padding);
    memcpy(&nbytes, reply + NBYTES_AT, sizeof nbytes);
    const uint64_t head = HEAD + padding;
    return nbytes > most || head > most - nbytes ? most : head + nbytes;
}

}  // namespace

// Send a request, unless it is empty, and wait for its reply, of which `came` bytes are there. Returns its bytes, at most
// `most`. 0: nothing was sent. Negative: it is not complete after `wait_ns`, or never will be: -1 - the bytes that came.
extern "C" __attribute__((visibility("default"))) int64_t moonpool_ask_now(int fd, const uint8_t* request,
                                                                         uint64_t request_nbytes, uint8_t* reply,
                                                                         uint64_t most, uint64_t came,
                                                                         int64_t wait_ns) {
    if (request_nbytes) {
        const ssize_t sent = send(fd, request, request_nbytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent <= 0) return 0;
        if ((uint64_t)sent != request_nbytes) return -1;
    }
    const int64_t began = now_ns();
    while (true) {
        const ssize_t received = recv(fd, reply + came, wanted(reply, came, most) - came, MSG_DONTWAIT);
        if (received > 0) {
            came += received;
            if (came >= HEAD && came == wanted(reply, came, most)) return came;
            continue;
        }
        const bool again = received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
        const int64_t left = wait_ns - (now_ns() - began);
        if (!again || left <= 0) return -1 - (int64_t)came;
        if (wait_ns - left >= SPIN_NS) {
            const timespec pause = {0, left};
            pollfd readable = {fd, POLLIN, 0};
            ppoll(&readable, 1, &pause, nullptr);
        }
    }
}
