// A time of day that is shifted by SHIFTED_CLOCK_S seconds and runs SHIFTED_CLOCK_RATE times as fast, for programs that
// are started with this library in LD_PRELOAD. Monotonic clocks are left alone, as they are when somebody sets a clock.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define BILLION 1000000000LL
#define EARLIEST_TIME_OF_DAY 500000000  // seconds; a deadline before it is of a monotonic clock

static long long start_ns, shift_ns;
static double rate = 1;

static long long read_ns(clockid_t clock) {
    struct timespec now;
    syscall(SYS_clock_gettime, clock, &now);
    return now.tv_sec * BILLION + now.tv_nsec;
}

__attribute__((constructor)) static void start(void) {
    const char *shift = getenv("SHIFTED_CLOCK_S"), *factor = getenv("SHIFTED_CLOCK_RATE");
    start_ns = read_ns(CLOCK_REALTIME);
    shift_ns = (shift ? atoll(shift) : 0) * BILLION;
    rate = factor ? atof(factor) : 1;
}

static struct timespec to_timespec(long long ns) {
    return (struct timespec){.tv_sec = ns / BILLION, .tv_nsec = ns % BILLION};
}

static struct timespec shift(long long real_ns) {
    return to_timespec(start_ns + shift_ns + (long long)((double)(real_ns - start_ns) * rate));
}

static struct timespec shift_back(const struct timespec *deadline) {
    long long ns = deadline->tv_sec * BILLION + deadline->tv_nsec;
    return to_timespec(start_ns + (long long)((double)(ns - shift_ns - start_ns) / rate));
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    long result = syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        *now = shift(now->tv_sec * BILLION + now->tv_nsec);
    }
    return (int)result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec shifted = shift(read_ns(CLOCK_REALTIME));
    (void)zone;
    now->tv_sec = shifted.tv_sec;
    now->tv_usec = shifted.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    time_t seconds = shift(read_ns(CLOCK_REALTIME)).tv_sec;
    if (result) {
        *result = seconds;
    }
    return seconds;
}

// --- waits until a time of day: the kernel knows the real one ---

static void *find(const char *name, const char *version) {
    void *original = dlvsym(RTLD_NEXT, name, version);
    return original ? original : dlsym(RTLD_NEXT, name);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *) = find("pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec real = deadline->tv_sec < EARLIEST_TIME_OF_DAY ? *deadline : shift_back(deadline);
    return wait(condition, mutex, &real);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    int (*wait)(sem_t *, const struct timespec *) = find("sem_timedwait", "GLIBC_2.2.5");
    struct timespec real = shift_back(deadline);
    return wait(semaphore, &real);
}
