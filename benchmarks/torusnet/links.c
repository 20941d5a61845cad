/* links: emulate wires between network namespaces, with a rate, a delay and fair queues, over TUN devices.
 *
 * One line on standard input describes a wire:
 *
 *     NAMESPACE DEVICE NAMESPACE DEVICE MBIT MICROSECONDS
 *
 * Both devices are created. A packet that enters at one end waits in the queue of its flow; the wire serves flows in
 * turn, so that a stream of large packets does not delay a small message. The wire is busy for the packet's bits over
 * its rate, and the packet leaves the other end one delay later. The two directions are independent. "ready" is printed
 * when all wires are up. SIGTERM ends the program, which then prints how late packets were delivered, on average and at
 * worst: the error of the emulation itself. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_DIRECTIONS = 1024, FLOWS = 128, MAX_PACKET = 65536, QUANTUM = 4000, NONE = -1 };
static const uint64_t NEVER = UINT64_MAX;

typedef struct packet {
    struct packet *next;
    uint64_t when; /* nanoseconds: of arrival, then of delivery */
    int length;
    unsigned char bytes[];
} packet;

typedef struct { packet *first, *last; } queue;

typedef struct {
    queue waiting;
    int credit, next; /* bytes it may still send in this turn; the next flow of the round */
} flow;

typedef struct {
    int out;
    double ns_per_byte;
    uint64_t delay, free_at;
    flow flows[FLOWS];
    int head, tail; /* of the round of waiting flows */
    queue in_flight;
} direction;

static direction directions[MAX_DIRECTIONS];
static int count, by_file[2 * MAX_DIRECTIONS];
static volatile sig_atomic_t stopped;

static void stop(int signal_number) { (void)signal_number; stopped = 1; }

static void fail(const char *what) { perror(what); exit(1); }

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void append_packet(queue *q, packet *p) {
    p->next = NULL;
    if (q->first) q->last->next = p; else q->first = p;
    q->last = p;
}

static packet *take_packet(queue *q) {
    packet *p = q->first;
    q->first = p->next;
    return p;
}

static int open_tun(const char *name_space, const char *device) {
    char path[256];
    snprintf(path, sizeof path, "/var/run/netns/%s", name_space);
    int name_space_file = open(path, O_RDONLY | O_CLOEXEC);
    if (name_space_file < 0 || setns(name_space_file, CLONE_NEWNET)) fail(path);
    close(name_space_file);
    int file = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strncpy(request.ifr_name, device, IFNAMSIZ - 1);
    if (file < 0 || ioctl(file, TUNSETIFF, &request)) fail(device);
    if (file >= 2 * MAX_DIRECTIONS) { fprintf(stderr, "too many wires\n"); exit(1); }
    return file;
}

static void add_direction(int in, int out, double mbit, double delay_us) {
    direction *d = &directions[count];
    d->out = out;
    d->ns_per_byte = 8000.0 / mbit;
    d->delay = (uint64_t)(delay_us * 1000);
    d->head = d->tail = NONE;
    by_file[in] = count++;
}

static void add_wires(int poll) {
    char line[256], first[64], first_device[16], second[64], second_device[16];
    double mbit, delay_us;
    while (fgets(line, sizeof line, stdin)) {
        int fields = sscanf(line, "%63s %15s %63s %15s %lf %lf", first, first_device, second, second_device, &mbit,
                            &delay_us);
        if (fields != 6 || mbit <= 0 || delay_us < 0 || count + 2 > MAX_DIRECTIONS) {
            fprintf(stderr, "no such wire: %s", line);
            exit(1);
        }
        int ends[2] = {open_tun(first, first_device), open_tun(second, second_device)};
        add_direction(ends[0], ends[1], mbit, delay_us);
        add_direction(ends[1], ends[0], mbit, delay_us);
        for (int i = 0; i < 2; i++) {
            struct epoll_event event = {.events = EPOLLIN, .data.fd = ends[i]};
            if (epoll_ctl(poll, EPOLL_CTL_ADD, ends[i], &event)) fail("epoll_ctl");
        }
    }
}

/* Return the flow of a packet, from its IPv4 addresses and ports. */
static int find_flow(const packet *p) {
    uint32_t fields[3] = {0};
    if (p->length >= 20) memcpy(fields, p->bytes + 12, 8);
    int header = (p->bytes[0] & 15) * 4;
    if (p->length >= header + 4) memcpy(fields + 2, p->bytes + header, 4);
    uint32_t hash = 2166136261u;
    for (int i = 0; i < 3; i++) hash = (hash ^ fields[i]) * 2654435761u, hash ^= hash >> 13;
    return (int)((hash >> 7) % FLOWS);
}

static void join_round(direction *d, int id, int at_front) {
    flow *f = &d->flows[id];
    if (d->head == NONE) {
        f->next = NONE;
        d->head = d->tail = id;
    } else if (at_front) {
        f->next = d->head;
        d->head = id;
    } else {
        f->next = NONE;
        d->flows[d->tail].next = id;
        d->tail = id;
    }
}

static int leave_round(direction *d) {
    int id = d->head;
    d->head = d->flows[id].next;
    if (d->head == NONE) d->tail = NONE;
    return id;
}

/* Queue a packet. A flow that was idle goes first: it is a small message, or the beginning of a large one. */
static void enqueue(direction *d, packet *p) {
    int id = find_flow(p);
    flow *f = &d->flows[id];
    int idle = f->waiting.first == NULL;
    append_packet(&f->waiting, p);
    if (idle) {
        f->credit = QUANTUM;
        join_round(d, id, 1);
    }
}

static void serve(direction *d, uint64_t time) {
    while (d->head != NONE && d->free_at <= time) {
        flow *f = &d->flows[d->head];
        if (f->credit <= 0) {
            int id = leave_round(d);
            f->credit += QUANTUM;
            join_round(d, id, 0);
            continue;
        }
        packet *p = take_packet(&f->waiting);
        f->credit -= p->length;
        if (!f->waiting.first) leave_round(d);
        uint64_t start = p->when > d->free_at ? p->when : d->free_at;
        d->free_at = start + (uint64_t)(p->length * d->ns_per_byte);
        p->when = d->free_at + d->delay;
        append_packet(&d->in_flight, p);
    }
}

static uint64_t total_late_ns, max_late_ns, delivered;

static void deliver(direction *d, uint64_t time) {
    while (d->in_flight.first && d->in_flight.first->when <= time) {
        packet *p = take_packet(&d->in_flight);
        uint64_t late = time - p->when;
        total_late_ns += late;
        delivered++;
        if (late > max_late_ns) max_late_ns = late;
        if (write(d->out, p->bytes, (size_t)p->length) < 0 && errno != EAGAIN && errno != EIO && errno != EINVAL)
            fail("write");
        free(p);
    }
}

static uint64_t next_event(const direction *d) {
    uint64_t when = d->in_flight.first ? d->in_flight.first->when : NEVER;
    return d->head != NONE && d->free_at < when ? d->free_at : when;
}

static void read_all(int file) {
    static unsigned char bytes[MAX_PACKET];
    for (int i = 0; i < 64; i++) {
        ssize_t length = read(file, bytes, sizeof bytes);
        if (length <= 0) return;
        packet *p = malloc(sizeof *p + (size_t)length);
        if (!p) fail("malloc");
        p->length = (int)length;
        p->when = now();
        memcpy(p->bytes, bytes, (size_t)length);
        enqueue(&directions[by_file[file]], p);
    }
}

int main(void) {
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* end with the parent process */
    struct sigaction action = {.sa_handler = stop};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    struct sched_param first = {.sched_priority = 20};
    if (sched_setscheduler(0, SCHED_FIFO, &first)) perror("links: no real-time priority"); /* packets will be late */
    int poll = epoll_create1(EPOLL_CLOEXEC), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    add_wires(poll);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = timer}, events[64];
    if (epoll_ctl(poll, EPOLL_CTL_ADD, timer, &event)) fail("epoll_ctl");
    printf("ready\n");
    fflush(stdout);
    while (!stopped) {
        int ready = epoll_wait(poll, events, 64, -1);
        if (ready < 0 && errno != EINTR) fail("epoll_wait");
        for (int i = 0; i < ready; i++) {
            uint64_t ticks;
            if (events[i].data.fd != timer) read_all(events[i].data.fd);
            else if (read(timer, &ticks, sizeof ticks) < 0 && errno != EAGAIN) fail("timer");
        }
        uint64_t time = now(), next = NEVER;
        for (int i = 0; i < count; i++) {
            serve(&directions[i], time);
            deliver(&directions[i], time);
            uint64_t when = next_event(&directions[i]);
            if (when < next) next = when;
        }
        struct itimerspec alarm = {0};
        if (next != NEVER) {
            alarm.it_value.tv_sec = (time_t)(next / 1000000000u);
            alarm.it_value.tv_nsec = (long)(next % 1000000000u);
        }
        timerfd_settime(timer, TFD_TIMER_ABSTIME, &alarm, NULL);
    }
    printf("%llu packets, %.1f us late on average, %.1f ms at worst\n", (unsigned long long)delivered,
           delivered ? (double)total_late_ns / (double)delivered / 1e3 : 0.0, (double)max_late_ns / 1e6);
    return 0;
}
