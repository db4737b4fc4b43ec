/* A wall clock that jumps: seconds from the file CLOCK_FILE are added to the time of day.

   Loaded with LD_PRELOAD. Clocks that cannot be set, as CLOCK_MONOTONIC, are left alone. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *ahead_s;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("CLOCK_FILE");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *seen = mmap(NULL, sizeof *ahead_s, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (seen != MAP_FAILED) ahead_s = seen;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
  int failed = (int)syscall(SYS_clock_gettime, clock, found);
  if (!failed && ahead_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    found->tv_sec += *ahead_s;
  return failed;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
  struct timespec now;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  found->tv_sec = now.tv_sec;
  found->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *found) {
  struct timespec now;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  if (found) *found = now.tv_sec;
  return now.tv_sec;
}
