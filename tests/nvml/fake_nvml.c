/* An NVML for machines without a GPU: the real pynvml loads it as libnvidia-ml.so.1.
 *
 * The machine is described by a text file that the variable OOMRUN_FAKE_NVML names and
 * that is read again at every call, so that a test changes it while a process runs.
 * A line is "key value"; a key that begins with a GPU's number, or with
 * "<GPU>.mig.<n>" for a MIG device, belongs to that device:
 *
 *   driver 555.42.02             gpus 8
 *   0.uuid GPU-...               0.name NVIDIA H100        0.bus 00000000:07:00.0
 *   0.total 85899345920          0.reserved 600000000      0.used 0
 *   0.processes 41:1000,42:2000  0.graphics 43:500         0.capability 9.0
 *   0.mig_mode 1                 0.migs 2                  0.mig.0.uuid MIG-...
 *   0.mig.0.instance 1           0.mig.0.compute 0
 *   0.utilization 87             0.temperature 61          0.power 312000
 *   0.links 4                    0.link.0.bus 00000000:0B:00.0   0.link.0.type 0
 *   process.41 python
 *   fail.<function> <NVML error>      fail.<function>.<device> <NVML error>
 *   hang.<function> <seconds>
 *
 * "used" is what no listed process accounts for; free = total - reserved - used - what
 * the processes hold. A MIG device's memory is its own and not taken off its GPU's.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    ARGUMENT_VERSION_MISMATCH = 25
};
#define HIDDEN UINT64_MAX /* NVML_VALUE_NOT_AVAILABLE */
#define MEMORY_V2 0x02000028u
#define MAX_GPUS 16
#define MAX_MIGS 7

typedef struct { int gpu, mig; } device_t; /* mig is -1 for a whole GPU */
typedef struct { unsigned long long total, free, used; } memory_v1_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_v2_t;
typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} process_t;
typedef struct {
    char bus_legacy[16];
    unsigned domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
} pci_t;

static int initialised = 0;
static device_t handles[MAX_GPUS][MAX_MIGS + 1];

/* The value of a key, or NULL. The answer lives until the next call in this thread. */
static const char *lookup(const char *key) {
    static _Thread_local char line[4096];
    const char *path = getenv("OOMRUN_FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    size_t length = strlen(key);
    if (!file) return NULL;
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, key, length) == 0 && line[length] == ' ') {
            fclose(file);
            line[strcspn(line, "\n")] = 0;
            return line + length + 1;
        }
    }
    fclose(file);
    return NULL;
}

static long long number(const char *key, long long otherwise) {
    const char *value = lookup(key);
    return value ? atoll(value) : otherwise;
}

static void device_key(char *key, size_t size, const device_t *d, const char *name) {
    if (d->mig < 0) snprintf(key, size, "%d%s%s", d->gpu, *name ? "." : "", name);
    else snprintf(key, size, "%d.mig.%d%s%s", d->gpu, d->mig, *name ? "." : "", name);
}

static const char *text_of(const device_t *d, const char *name) {
    char key[128];
    device_key(key, sizeof key, d, name);
    return lookup(key);
}

static long long number_of(const device_t *d, const char *name, long long otherwise) {
    const char *value = text_of(d, name);
    return value ? atoll(value) : otherwise;
}

/* What the file says that this call should do wrong: hang, fail, fail for a device. */
static int fault(const char *function, const device_t *d) {
    char key[192], device[64];
    snprintf(key, sizeof key, "hang.%s", function);
    long long seconds = number(key, 0);
    if (seconds > 0) sleep((unsigned)seconds);
    snprintf(key, sizeof key, "fail.%s", function);
    int code = (int)number(key, SUCCESS);
    if (code == SUCCESS && d) {
        device_key(device, sizeof device, d, "");
        snprintf(key, sizeof key, "fail.%s.%s", function, device);
        code = (int)number(key, SUCCESS);
    }
    return code;
}

#define BEGIN(d)                                   \
    do {                                           \
        if (!initialised) return UNINITIALIZED;    \
        int code = fault(__func__, (d));           \
        if (code != SUCCESS) return code;          \
    } while (0)

static int put(char *to, unsigned size, const char *value) {
    if (!value) return NOT_SUPPORTED;
    if (strlen(value) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(to, value);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int code = fault(__func__, NULL);
    if (code != SUCCESS) return code;
    for (int gpu = 0; gpu < MAX_GPUS; gpu++)
        for (int slot = 0; slot <= MAX_MIGS; slot++)
            handles[gpu][slot] = (device_t){gpu, slot - 1};
    initialised++;
    return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    BEGIN(NULL);
    initialised--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    static _Thread_local char text[64];
    snprintf(text, sizeof text, "fake NVML error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    BEGIN(NULL);
    return put(version, size, lookup("driver"));
}

int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size) {
    char key[64];
    BEGIN(NULL);
    snprintf(key, sizeof key, "process.%u", pid);
    const char *value = lookup(key);
    return value ? put(name, size, value) : NOT_FOUND;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    BEGIN(NULL);
    *count = (unsigned)number("gpus", 0);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t **device) {
    if (index >= MAX_GPUS || index >= number("gpus", 0)) return INVALID_ARGUMENT;
    BEGIN(&handles[index][0]);
    *device = &handles[index][0];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t **device) {
    BEGIN(NULL);
    for (int gpu = 0; gpu < number("gpus", 0) && gpu < MAX_GPUS; gpu++)
        for (int slot = 0; slot <= MAX_MIGS; slot++) {
            device_t *d = &handles[gpu][slot];
            if (d->mig >= number_of(&handles[gpu][0], "migs", 0)) break;
            const char *own = text_of(d, "uuid");
            if (own && strcmp(own, uuid) == 0) {
                BEGIN(d);
                *device = d;
                return SUCCESS;
            }
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(device_t *d, char *uuid, unsigned size) {
    BEGIN(d);
    return put(uuid, size, text_of(d, "uuid"));
}

int nvmlDeviceGetName(device_t *d, char *name, unsigned size) {
    BEGIN(d);
    return put(name, size, text_of(d, "name"));
}

int nvmlDeviceGetCudaComputeCapability(device_t *d, int *major, int *minor) {
    BEGIN(d);
    const char *value = text_of(d, "capability");
    return value && sscanf(value, "%d.%d", major, minor) == 2 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetPciInfo_v3(device_t *d, pci_t *pci) {
    BEGIN(d);
    memset(pci, 0, sizeof *pci);
    return put(pci->bus_id, sizeof pci->bus_id, text_of(d, "bus"));
}

/* --- memory and processes --- */

/* Reads "pid:bytes,pid:bytes" into processes; bytes may be "-", which is "hidden". */
static unsigned read_processes(const device_t *d, const char *name, process_t *to,
                               unsigned room) {
    const char *at = text_of(d, name);
    unsigned count = 0;
    while (at && *at && *at != '-') {
        char *end;
        unsigned pid = (unsigned)strtoul(at, &end, 10);
        unsigned long long used = HIDDEN;
        if (*end == ':' && end[1] == '-') end += 2;
        else if (*end == ':') used = strtoull(end + 1, &end, 10);
        if (count < room) to[count] = (process_t){pid, used, UINT32_MAX, UINT32_MAX};
        count++;
        at = *end == ',' ? end + 1 : NULL;
    }
    return count;
}

static unsigned long long held(const device_t *d, const char *name) {
    process_t all[64];
    unsigned long long sum = 0;
    unsigned count = read_processes(d, name, all, 64);
    for (unsigned i = 0; i < count && i < 64; i++)
        if (all[i].used != HIDDEN) sum += all[i].used;
    return sum;
}

static int memory_of(const device_t *d, memory_v2_t *memory) {
    long long total = number_of(d, "total", -1);
    if (total < 0) return NOT_SUPPORTED;
    memory->total = (unsigned long long)total;
    memory->reserved = (unsigned long long)number_of(d, "reserved", 0);
    memory->used = (unsigned long long)number_of(d, "used", 0) + held(d, "processes") +
                   held(d, "graphics");
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(device_t *d, memory_v2_t *memory) {
    BEGIN(d);
    return memory->version == MEMORY_V2 ? memory_of(d, memory)
                                        : ARGUMENT_VERSION_MISMATCH;
}

int nvmlDeviceGetMemoryInfo(device_t *d, memory_v1_t *memory) {
    memory_v2_t full;
    BEGIN(d);
    int code = memory_of(d, &full);
    if (code == SUCCESS) /* the first version counts reserved memory as used */
        *memory = (memory_v1_t){full.total, full.free, full.used + full.reserved};
    return code;
}

static int list(device_t *d, const char *name, unsigned *count, process_t *to) {
    unsigned room = to ? *count : 0;
    *count = read_processes(d, name, to, room);
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t *d, unsigned *n, process_t *to) {
    BEGIN(d);
    return list(d, "processes", n, to);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t *d, unsigned *n, process_t *to) {
    BEGIN(d);
    return list(d, "graphics", n, to);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(device_t *d, unsigned *n,
                                               process_t *to) {
    BEGIN(d);
    return list(d, "mps", n, to);
}

/* --- what else is watched --- */

int nvmlDeviceGetUtilizationRates(device_t *d, utilization_t *rates) {
    BEGIN(d);
    long long busy = number_of(d, "utilization", -1);
    *rates = (utilization_t){(unsigned)busy, (unsigned)busy};
    return busy < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetTemperature(device_t *d, unsigned sensor, unsigned *celsius) {
    BEGIN(d);
    long long found = number_of(d, "temperature", -1);
    if (sensor != 0) return INVALID_ARGUMENT;
    *celsius = (unsigned)found;
    return found < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetPowerUsage(device_t *d, unsigned *milliwatts) {
    BEGIN(d);
    long long found = number_of(d, "power", -1);
    *milliwatts = (unsigned)found;
    return found < 0 ? NOT_SUPPORTED : SUCCESS;
}

/* --- MIG --- */

int nvmlDeviceGetMigMode(device_t *d, unsigned *current, unsigned *pending) {
    BEGIN(d);
    long long mode = number_of(d, "mig_mode", -1);
    if (mode < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)mode;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t *d, unsigned *count) {
    BEGIN(d);
    *count = number_of(d, "mig_mode", -1) < 0 ? 0 : MAX_MIGS;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t *d, unsigned index, device_t **mig) {
    BEGIN(d);
    if (index >= number_of(d, "migs", 0)) return NOT_FOUND;
    *mig = &handles[d->gpu][index + 1];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(device_t *d, unsigned *id) {
    BEGIN(d);
    *id = (unsigned)number_of(d, "instance", 0);
    return d->mig < 0 ? INVALID_ARGUMENT : SUCCESS;
}

int nvmlDeviceGetComputeInstanceId(device_t *d, unsigned *id) {
    BEGIN(d);
    *id = (unsigned)number_of(d, "compute", 0);
    return d->mig < 0 ? INVALID_ARGUMENT : SUCCESS;
}

/* --- NVLink --- */

int nvmlDeviceGetNvLinkState(device_t *d, unsigned link, unsigned *active) {
    BEGIN(d);
    long long links = number_of(d, "links", -1);
    if (links < 0) return NOT_SUPPORTED;
    if (link >= links) return INVALID_ARGUMENT;
    char name[64];
    snprintf(name, sizeof name, "link.%u.down", link);
    *active = number_of(d, name, 0) == 0;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(device_t *d, unsigned link, pci_t *pci) {
    char name[64];
    BEGIN(d);
    memset(pci, 0, sizeof *pci);
    snprintf(name, sizeof name, "link.%u.bus", link);
    return put(pci->bus_id, sizeof pci->bus_id, text_of(d, name));
}

int nvmlDeviceGetNvLinkRemoteDeviceType(device_t *d, unsigned link, unsigned *type) {
    char name[64];
    BEGIN(d);
    snprintf(name, sizeof name, "link.%u.type", link);
    *type = (unsigned)number_of(d, name, 255);
    return SUCCESS;
}
