// What NVML answers about one GPU, as the test has set it: a stand-in for libnvidia-ml.so.1.
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10, GPU_IS_LOST = 15 };

struct state {
    int lost, no_slowdown;
    unsigned busy, celsius, slowdown, margin, milliwatts, megahertz;
    unsigned long long used, total, corrected, uncorrected, reasons, xid;
};
struct state stand_in = {0, 0, 40, 50, 90, 0, 300000, 1980, 8ULL << 30, 80ULL << 30, 0, 0, 0, 0};

struct rates { unsigned gpu, memory; };
struct memory { unsigned long long total, free, used; };
struct margin { unsigned version; int celsius; };
struct event { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; };

#define ANSWER(into, value) \
    do { \
        if (stand_in.lost) return GPU_IS_LOST; \
        *(into) = (value); \
        return OK; \
    } while (0)

int nvmlInitWithFlags(unsigned flags) { return OK; }
const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : code == NOT_FOUND ? "Not Found" : "error"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = &stand_in;
    return strcmp(uuid, "GPU-stand-in") ? NOT_FOUND : OK;
}
int nvmlDeviceGetIndex(void *device, unsigned *index) { *index = 3; return OK; }
int nvmlDeviceGetUtilizationRates(void *device, struct rates *rates) { ANSWER(rates, ((struct rates){stand_in.busy, 0})); }
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    ANSWER(memory, ((struct memory){stand_in.total, stand_in.total - stand_in.used, stand_in.used}));
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { ANSWER(milliwatts, stand_in.milliwatts); }
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *megahertz) { ANSWER(megahertz, stand_in.megahertz); }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) { ANSWER(reasons, stand_in.reasons); }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) { ANSWER(celsius, stand_in.celsius); }
int nvmlDeviceGetTemperatureThreshold(void *device, int which, unsigned *celsius) {
    if (stand_in.no_slowdown) return NOT_SUPPORTED;
    ANSWER(celsius, stand_in.slowdown);
}
int nvmlDeviceGetMarginTemperature(void *device, struct margin *margin) {
    margin->celsius = stand_in.margin;
    return OK;
}
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *count) {
    ANSWER(count, kind ? stand_in.uncorrected : stand_in.corrected);
}
int nvmlEventSetCreate(void **set) { *set = &stand_in; return OK; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) { return OK; }
int nvmlEventSetWait_v2(void *set, struct event *event, unsigned timeout_ms) {
    if (!stand_in.xid) return TIMEOUT;
    *event = (struct event){&stand_in, 8, stand_in.xid, 0, 0};
    stand_in.xid = 0;
    return OK;
}
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = &stand_in; return OK; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    if (stand_in.lost) return GPU_IS_LOST;
    strncpy(uuid, "GPU-stand-in", length);
    return OK;
}
