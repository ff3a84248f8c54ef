/* A stand-in for libcudart and libcuda where there is no GPU: what Moonpool calls of them, over memory of the host.

   Device pointers point to pages nobody may touch, so that a processor's access is a fault; the bytes are in a memfd
   mapped a second time. Streams are threads, so copies really come later. An IPC handle names the memfd, so other
   processes really share it. Freed memory is cut from under whoever still has it mapped.

   STAND_IN_DEVICES, STAND_IN_VERSION (13000), STAND_IN_NO_IPC, STAND_IN_COPY_US (how long each copy waits). */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, UNINITIALIZED = 201, ALREADY_MAPPED = 208,
       INVALID_HANDLE = 400, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801 };
enum { MOST = 4096, HANDLE_NBYTES = 64 };

typedef struct { char *address, *bytes; size_t nbytes; int device, fd, imported; char handle[HANDLE_NBYTES]; } Allocation;
typedef struct { char *address; size_t nbytes; } Pinned;
typedef struct Event { long recorded, reached; } Event;
typedef struct Op { struct Op *next; char *to, *from; size_t nbytes; Event *event; long turn; } Op;
typedef struct { pthread_t thread; Op *first, **last; int busy, ending; } Stream;
typedef struct { uint32_t magic, pid; int32_t fd, device; uint64_t nbytes; } Handle;
typedef struct { int type, device; void *device_pointer, *host_pointer; } PointerAttributes;
typedef struct { char bytes[HANDLE_NBYTES]; } IpcHandle;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Allocation allocations[MOST];
static Pinned pinned[MOST];
static long num_streams, num_events;
static __thread int current, last_error;

static int setting(const char *name, int otherwise) { char *text = getenv(name); return text ? atoi(text) : otherwise; }
static int done(int status) { if (status) last_error = status; return status; }

/* The allocation that all of these bytes are in. The lock is held. */
static Allocation *find(const void *address, size_t nbytes) {
    const char *at = address;
    for (int i = 0; i < MOST; i++) {
        Allocation *a = &allocations[i];
        if (a->address && at >= a->address && at + nbytes <= a->address + a->nbytes) return a;
    }
    return NULL;
}

static int touches_device(const char *at, size_t nbytes) {
    for (int i = 0; i < MOST; i++) {
        Allocation *a = &allocations[i];
        if (a->address && at < a->address + a->nbytes && at + nbytes > a->address) return 1;
    }
    return 0;
}

static int is_pinned(const char *at, size_t nbytes) {
    for (int i = 0; i < MOST; i++)
        if (pinned[i].address && at >= pinned[i].address && at + nbytes <= pinned[i].address + pinned[i].nbytes) return 1;
    return 0;
}

/* ---------------------------------------------------------------- devices */

int cudaRuntimeGetVersion(int *version) { *version = setting("STAND_IN_VERSION", 13000); return OK; }
int cudaGetDeviceCount(int *count) { *count = setting("STAND_IN_DEVICES", 2); return *count ? OK : done(100); }
int cudaGetDevice(int *device) { *device = current; return OK; }
int cudaGetLastError(void) { int error = last_error; last_error = OK; return error; }
const char *cudaGetErrorString(int status) { return status == INVALID_VALUE ? "invalid argument" : "stand-in error"; }

int cudaSetDevice(int device) {
    if (device < 0 || device >= setting("STAND_IN_DEVICES", 2)) return done(INVALID_DEVICE);
    current = device;
    return OK;
}

/* ---------------------------------------------------------------- memory */

static int add(int fd, size_t nbytes, int device, int imported, const char *handle, void **address) {
    char *guard = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *bytes = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (guard == MAP_FAILED || bytes == MAP_FAILED) return OUT_OF_MEMORY;
    for (int i = 0; i < MOST; i++)
        if (!allocations[i].address) {
            allocations[i] = (Allocation){guard, bytes, nbytes, device, fd, imported, {0}};
            if (handle) memcpy(allocations[i].handle, handle, HANDLE_NBYTES);
            *address = guard;
            return OK;
        }
    return OUT_OF_MEMORY;
}

static void drop(Allocation *a) {
    munmap(a->address, a->nbytes);
    munmap(a->bytes, a->nbytes);
    close(a->fd);
    memset(a, 0, sizeof *a);
}

int cudaMalloc(void **address, size_t nbytes) {
    int fd = memfd_create("stand-in device memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, nbytes)) return done(OUT_OF_MEMORY);
    pthread_mutex_lock(&lock);
    int status = add(fd, nbytes, current, 0, NULL, address);
    pthread_mutex_unlock(&lock);
    return done(status);
}

int cudaFree(void *address) {
    pthread_mutex_lock(&lock);
    Allocation *a = find(address, 1);
    int right = a && a->address == address && !a->imported;
    if (right) {
        /* Whoever else still has it mapped, which is undefined behaviour, gets a bus error. */
        if (ftruncate(a->fd, 0)) abort();
        drop(a);
    }
    pthread_mutex_unlock(&lock);
    return done(right ? OK : INVALID_VALUE);
}

int cudaPointerGetAttributes(PointerAttributes *attributes, const void *address) {
    pthread_mutex_lock(&lock);
    Allocation *a = find(address, 1);
    attributes->type = a ? 2 : is_pinned(address, 1) ? 1 : 0;
    attributes->device = a ? a->device : -2;
    pthread_mutex_unlock(&lock);
    return OK;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *nbytes, uint64_t address) {
    pthread_mutex_lock(&lock);
    Allocation *a = find((void *)address, 1);
    if (a) { *base = (uint64_t)a->address; *nbytes = a->nbytes; }
    pthread_mutex_unlock(&lock);
    return a ? OK : done(INVALID_VALUE);
}

int cudaHostRegister(void *address, size_t nbytes, unsigned flags) {
    pthread_mutex_lock(&lock);
    int status = is_pinned(address, 1) ? ALREADY_REGISTERED : OUT_OF_MEMORY;
    for (int i = 0; i < MOST && status == OUT_OF_MEMORY; i++)
        if (!pinned[i].address) { pinned[i] = (Pinned){address, nbytes}; status = OK; }
    pthread_mutex_unlock(&lock);
    return done(status);
}

int cudaHostUnregister(void *address) {
    int status = NOT_REGISTERED;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++)
        if (pinned[i].address == address) { pinned[i].address = NULL; status = OK; }
    pthread_mutex_unlock(&lock);
    return done(status);
}

/* ---------------------------------------------------------------- streams */

static void *work(void *argument) {
    Stream *stream = argument;
    int pause_us = setting("STAND_IN_COPY_US", 0);
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first && !stream->ending) pthread_cond_wait(&changed, &lock);
        Op *op = stream->first;
        if (!op) break;
        stream->busy = 1;
        if (!(stream->first = op->next)) stream->last = &stream->first;
        pthread_mutex_unlock(&lock);
        if (op->to) {
            if (pause_us) nanosleep(&(struct timespec){pause_us / 1000000, pause_us % 1000000 * 1000L}, NULL);
            memmove(op->to, op->from, op->nbytes);
        }
        pthread_mutex_lock(&lock);
        if (op->event) op->event->reached = op->turn;
        free(op);
        stream->busy = 0;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void enqueue(Stream *stream, Op filled) {
    Op *op = malloc(sizeof *op);
    *op = filled;
    op->next = NULL;
    *stream->last = op;
    stream->last = &op->next;
    pthread_cond_broadcast(&changed);
}

static void drain(Stream *stream) { while (stream->first || stream->busy) pthread_cond_wait(&changed, &lock); }

int cudaStreamCreateWithFlags(Stream **made, unsigned flags) {
    Stream *stream = calloc(1, sizeof *stream);
    stream->last = &stream->first;
    pthread_mutex_lock(&lock);
    num_streams++;
    pthread_mutex_unlock(&lock);
    pthread_create(&stream->thread, NULL, work, *made = stream);
    return OK;
}

int cudaStreamSynchronize(Stream *stream) {
    pthread_mutex_lock(&lock);
    drain(stream);
    pthread_mutex_unlock(&lock);
    return OK;
}

int cudaStreamDestroy(Stream *stream) {
    pthread_mutex_lock(&lock);
    drain(stream);
    stream->ending = 1;
    num_streams--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(stream->thread, NULL);
    free(stream);
    return OK;
}

int cudaEventCreateWithFlags(Event **made, unsigned flags) {
    pthread_mutex_lock(&lock);
    num_events++;
    pthread_mutex_unlock(&lock);
    *made = calloc(1, sizeof **made);
    return OK;
}

int cudaEventRecord(Event *event, Stream *stream) {
    pthread_mutex_lock(&lock);
    enqueue(stream, (Op){.event = event, .turn = ++event->recorded});
    pthread_mutex_unlock(&lock);
    return OK;
}

int cudaEventSynchronize(Event *event) {
    pthread_mutex_lock(&lock);
    while (event->reached < event->recorded) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return OK;
}

int cudaEventDestroy(Event *event) {
    pthread_mutex_lock(&lock);
    num_events--;
    pthread_mutex_unlock(&lock);
    free(event);
    return OK;
}

int cudaMemcpyAsync(void *to, const void *from, size_t nbytes, int kind, Stream *stream) {
    pthread_mutex_lock(&lock);
    Allocation *there = find(to, nbytes), *here = find(from, nbytes);
    int wild = (!there && touches_device(to, nbytes)) || (!here && touches_device(from, nbytes));
    if (kind != 4 || wild || !stream) {
        pthread_mutex_unlock(&lock);
        return done(INVALID_VALUE);
    }
    int pageable = (!there && !is_pinned(to, nbytes)) || (!here && !is_pinned(from, nbytes));
    char *to_bytes = there ? there->bytes + ((char *)to - there->address) : to;
    char *from_bytes = here ? here->bytes + ((char *)from - here->address) : (char *)from;
    enqueue(stream, (Op){.to = to_bytes, .from = from_bytes, .nbytes = nbytes});
    if (pageable) drain(stream);
    pthread_mutex_unlock(&lock);
    return OK;
}

int cudaMemcpyBatchAsync(void **to, void **from, size_t *nbytes, size_t count, int *attributes, size_t *first,
                         size_t num_attributes, void *failed_or_stream, void *stream_of_12) {
    int version = setting("STAND_IN_VERSION", 13000);
    if (version < 12080) return done(NOT_SUPPORTED);
    Stream *stream = version < 13000 ? stream_of_12 : failed_or_stream;
    if (num_attributes != 1 || *first || *attributes != 1 || !stream) return done(INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        int status = cudaMemcpyAsync(to[i], from[i], nbytes[i], 4, stream);
        if (status) return status;
    }
    return OK;
}

/* ---------------------------------------------------------------- other processes */

int cudaIpcGetMemHandle(IpcHandle *handle, void *address) {
    pthread_mutex_lock(&lock);
    Allocation *a = find(address, 1);
    int right = a && a->address == address && !a->imported && !setting("STAND_IN_NO_IPC", 0);
    memset(handle, 0, sizeof *handle);
    if (right) *(Handle *)handle = (Handle){0x4d504950, getpid(), a->fd, a->device, a->nbytes};
    pthread_mutex_unlock(&lock);
    return done(right ? OK : INVALID_VALUE);
}

int cudaIpcOpenMemHandle(void **address, IpcHandle handle, unsigned flags) {
    Handle *of = (Handle *)&handle;
    if (of->magic != 0x4d504950 || flags != 1) return done(INVALID_VALUE);
    if ((int)of->pid == getpid()) return done(UNINITIALIZED);
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/fd/%d", of->pid, of->fd);
    pthread_mutex_lock(&lock);
    int status = OK;
    for (int i = 0; i < MOST; i++)
        if (allocations[i].imported && !memcmp(allocations[i].handle, &handle, HANDLE_NBYTES)) status = ALREADY_MAPPED;
    int fd = status ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (!status) status = fd < 0 ? INVALID_HANDLE : add(fd, of->nbytes, current, 1, handle.bytes, address);
    pthread_mutex_unlock(&lock);
    return done(status);
}

int cudaIpcCloseMemHandle(void *address) {
    pthread_mutex_lock(&lock);
    Allocation *a = find(address, 1);
    int right = a && a->address == address && a->imported;
    if (right) drop(a);
    pthread_mutex_unlock(&lock);
    return done(right ? OK : INVALID_VALUE);
}

/* For tests: allocations of its own, imported ones, pinned ranges, streams, events. */
void stand_in_counts(long *counts) {
    memset(counts, 0, 5 * sizeof *counts);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++) {
        if (allocations[i].address) counts[allocations[i].imported]++;
        if (pinned[i].address) counts[2]++;
    }
    counts[3] = num_streams;
    counts[4] = num_events;
    pthread_mutex_unlock(&lock);
}
