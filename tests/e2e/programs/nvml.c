/* The library that NVIDIA's driver comes with, played. FAKE_NVML names a file with a line for each GPU:
 * utilization (%), bytes used, bytes there are, milliwatts, degrees, clock limits (a mask), memory errors
 * corrected and uncorrected, and then the XID errors it has had. It is read anew for each question. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK, INVALID_ARGUMENT = 2, TIMEOUT = 10, MOST = 16, XID_CRITICAL_ERROR = 8 };

typedef struct {
    unsigned long long used, total, reasons, corrected, uncorrected;
    unsigned utilization, milliwatts, celsius, xids;
    unsigned long long xid[MOST];
} Gpu;

static int handles[MOST];  /* their addresses are what devices are known by */
static unsigned told[MOST];

static int read_gpu(unsigned number, Gpu *gpu) {
    char line[512];
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    int found = 0;
    for (unsigned at = 0; file && fgets(line, sizeof line, file); at++)
        if (at == number) {
            int end = 0;
            found = sscanf(line, "%u %llu %llu %u %u %llu %llu %llu %n", &gpu->utilization, &gpu->used,
                           &gpu->total, &gpu->milliwatts, &gpu->celsius, &gpu->reasons, &gpu->corrected,
                           &gpu->uncorrected, &end) == 8;
            gpu->xids = 0;
            for (char *rest = line + end, *next; gpu->xids < MOST; rest = next) {
                gpu->xid[gpu->xids] = strtoull(rest, &next, 10);
                if (next == rest) break;
                gpu->xids++;
            }
        }
    if (file) fclose(file);
    return found ? OK : INVALID_ARGUMENT;
}

static int of(int *handle, Gpu *gpu) { return read_gpu(handle - handles, gpu); }

int nvmlInit_v2(void) { return OK; }
int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int result) { return "played"; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, int **handle) {
    Gpu gpu;
    *handle = &handles[index % MOST];
    return index < MOST ? read_gpu(index, &gpu) : INVALID_ARGUMENT;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    Gpu gpu;
    for (*count = 0; *count < MOST && read_gpu(*count, &gpu) == OK;) ++*count;
    return OK;
}

int nvmlDeviceGetUUID(int *handle, char *uuid, unsigned room) {
    snprintf(uuid, room, "GPU-%ld", (long)(handle - handles));
    return OK;
}

int nvmlDeviceGetUtilizationRates(int *handle, unsigned rates[2]) {
    Gpu gpu;
    int result = of(handle, &gpu);
    rates[0] = gpu.utilization, rates[1] = 0;
    return result;
}

int nvmlDeviceGetMemoryInfo(int *handle, unsigned long long memory[3]) {
    Gpu gpu;
    int result = of(handle, &gpu);
    memory[0] = gpu.total, memory[1] = gpu.total - gpu.used, memory[2] = gpu.used;
    return result;
}

int nvmlDeviceGetPowerUsage(int *handle, unsigned *milliwatts) {
    Gpu gpu;
    int result = of(handle, &gpu);
    *milliwatts = gpu.milliwatts;
    return result;
}

int nvmlDeviceGetTemperature(int *handle, int sensor, unsigned *celsius) {
    Gpu gpu;
    int result = of(handle, &gpu);
    *celsius = gpu.celsius;
    return result;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(int *handle, unsigned long long *reasons) {
    Gpu gpu;
    int result = of(handle, &gpu);
    *reasons = gpu.reasons;
    return result;
}

int nvmlDeviceGetTotalEccErrors(int *handle, int uncorrected, int counter, unsigned long long *count) {
    Gpu gpu;
    int result = of(handle, &gpu);
    *count = uncorrected ? gpu.uncorrected : gpu.corrected;
    return result;
}

static unsigned sets[MOST], made;  /* a mask each, of the devices whose events are in it */

int nvmlEventSetCreate(unsigned **set) { *set = &sets[made++ % MOST]; return OK; }

int nvmlDeviceRegisterEvents(int *handle, unsigned long long kinds, unsigned *set) {
    *set |= 1u << (handle - handles);
    return OK;
}

typedef struct { int *device; unsigned long long kind, data; unsigned instance, compute_instance; } Event;

int nvmlEventSetWait_v2(unsigned *set, Event *event, unsigned milliseconds) {
    Gpu gpu;
    for (unsigned at = 0; at < MOST && read_gpu(at, &gpu) == OK; at++)
        if (*set >> at & 1 && told[at] < gpu.xids) {
            event->device = &handles[at];
            event->kind = XID_CRITICAL_ERROR;
            event->data = gpu.xid[told[at]++];
            event->instance = event->compute_instance = ~0u;
            return OK;
        }
    return TIMEOUT;
}
