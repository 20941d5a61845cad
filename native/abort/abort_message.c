/* Replace the abort of a process that has lost its peers by one sentence and an exit code.
 *
 * JAX's runtime ends such a process by abort() in one of its own background threads, where Python cannot intervene. The
 * handler distinguishes that abort from all others by the stack: abort() was called by jaxlib itself, not by the C
 * library that found a corrupt heap, and no Python frame lies below it. Any other abort keeps its default effect.
 *
 * Why it aborts, jaxlib only logs; it aborts on its own defects, too. So the text of that log message, which the stack of
 * the aborting thread points to, must be that of the distributed service. It also says whether a second process has
 * joined with a number that is taken. Memory is read through a pipe,
 * because the kernel refuses to copy what is not mapped, where an ordinary read would crash. The text is looked for only
 * outside of jaxlib's own files, which hold it too, as a constant, and this file holds it backwards.
 *
 * The handler calls nothing that takes a lock, but for backtrace() with C libraries older than glibc 2.35: the address
 * ranges are looked up when it is installed. Should it crash all the same, or not end within some seconds, because the
 * stack is corrupt or nobody reads stderr, a second handler ends the process: with the exit code if it is already known
 * that peers are lost, else with SIGABRT. A second thread that aborts meanwhile waits for the first.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    MAX_FRAMES = 64,
    MAX_RANGES = 512,
    ABORT_BYTES = 1024,
    STACK_WORDS = 4096,
    COPY_BYTES = 16384,
    PAGE_BYTES = 4096, /* or a divisor: what is copied at once is mapped as a whole, or not at all */
    PATIENCE_S = 20
};

typedef struct {
    uintptr_t start, stop;
} Range;

typedef struct {
    Range ranges[MAX_RANGES];
    int count;
} Object;

typedef struct {
    char text[1024];
    size_t length;
} Message;

static const char NEKAT[] = "tcennoc ot deirt yldetcepxenu", TSOL[] = "srorre lataf detceted ecivres detubirtsid";
enum { LOST = 1, TAKEN = 2 }; /* which of the two texts were found */
static Message lost_message, taken_message;
static int exit_code, copy_pipe[2] = {-1, -1};
static char copied[COPY_BYTES];
static Object jaxlib, jaxlib_files, python; /* code; all that is mapped from its files; code */
static uintptr_t abort_address;
static atomic_int aborting_thread;
static volatile sig_atomic_t peer_is_lost;

static int contains(const Object *object, uintptr_t address) {
    for (int i = 0; i < object->count; i++)
        if (address >= object->ranges[i].start && address < object->ranges[i].stop)
            return 1;
    return 0;
}

/* Return whether jaxlib called abort() in a thread that runs no Python. */
static int is_runtime_thread(void) {
    void *frames[MAX_FRAMES];
    int count = backtrace(frames, MAX_FRAMES), caller = 0;
    for (int i = 0; i + 1 < count && !caller; i++) {
        uintptr_t address = (uintptr_t)frames[i];
        if (address >= abort_address && address < abort_address + ABORT_BYTES)
            caller = i + 1;
    }
    if (!caller || !contains(&jaxlib, (uintptr_t)frames[caller]))
        return 0;
    for (int i = caller; i < count; i++)
        if (contains(&python, (uintptr_t)frames[i]))
            return 0;
    return 1;
}

/* Copy bytes that begin at an address, which need not be mapped; return how many there are before jaxlib's files. */
static size_t copy_memory(uintptr_t address, size_t bytes) {
    size_t count = 0;
    while (count < bytes && !contains(&jaxlib_files, address + count)) {
        size_t page = PAGE_BYTES - (address + count) % PAGE_BYTES, part = page < bytes - count ? page : bytes - count;
        if (write(copy_pipe[1], (const void *)(address + count), part) != (ssize_t)part ||
            read(copy_pipe[0], copied + count, part) != (ssize_t)part)
            break;
        count += part;
    }
    return count;
}

/* Return whether the bytes that were copied have a text, which is given backwards. */
static int has_text(size_t count, const char *text, size_t length) {
    for (size_t i = 0; i + length <= count; i++) {
        size_t same = 0;
        while (same < length && copied[i + same] == text[length - 1 - same])
            same++;
        if (same == length)
            return 1;
    }
    return 0;
}

/* Return which of the texts memory holds that this thread's stack points to. */
static int find_texts(void) {
    volatile uintptr_t here = 0;
    uintptr_t start = (uintptr_t)&here, before = 0;
    int found = 0;
    for (size_t i = 0; i < STACK_WORDS; i++) {
        uintptr_t word;
        if (copy_memory(start + i * sizeof word, sizeof word) < sizeof word)
            break; /* the end of the stack */
        memcpy(&word, copied, sizeof word);
        if (word < PAGE_BYTES || word > UINTPTR_MAX - COPY_BYTES || word == before || word % sizeof word)
            continue;
        before = word;
        size_t count = copy_memory(word, COPY_BYTES);
        if (has_text(count, TSOL, sizeof TSOL - 1))
            found |= LOST;
        if (has_text(count, NEKAT, sizeof NEKAT - 1))
            return LOST | TAKEN;
    }
    return found;
}

/* End with the default effect of an abort, also where SIGABRT is blocked, as inside of its handler. */
static void abort_by_default(void) {
    sigset_t set;
    signal(SIGABRT, SIG_DFL);
    sigemptyset(&set);
    sigaddset(&set, SIGABRT);
    raise(SIGABRT);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
}

static void end(const Message *message) {
    for (size_t done = 0; done < message->length;) {
        ssize_t written = write(STDERR_FILENO, message->text + done, message->length - done);
        if (written <= 0)
            break;
        done += (size_t)written;
    }
    _exit(exit_code);
}

/* The handler of aborts has crashed, or does not end. */
static void give_up(int number) {
    (void)number;
    if (peer_is_lost)
        _exit(exit_code);
    abort_by_default();
}

/* Let another handler end the process if this one fails. */
static void guard_handler(void) {
    static const int signals[] = {SIGSEGV, SIGBUS, SIGALRM};
    struct sigaction action;
    sigset_t set;
    memset(&action, 0, sizeof action);
    action.sa_handler = give_up;
    sigemptyset(&action.sa_mask);
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        sigaction(signals[i], &action, NULL);
        sigaddset(&set, signals[i]);
    }
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    alarm(PATIENCE_S);
}

static void handle_abort(int number) {
    (void)number;
    int nobody = 0, self = (int)syscall(SYS_gettid);
    if (!atomic_compare_exchange_strong(&aborting_thread, &nobody, self)) {
        if (nobody == self) /* the handler itself has called abort() */
            give_up(SIGABRT);
        for (;;)
            pause();
    }
    guard_handler();
    int texts = !is_runtime_thread() ? 0 : copy_pipe[0] >= 0 ? find_texts() : LOST;
    if (!texts) {
        alarm(0);
        abort_by_default();
        return;
    }
    peer_is_lost = 1;
    end(texts & TAKEN ? &taken_message : &lost_message);
}

static void set_message(Message *message, const char *text, Py_ssize_t length) {
    message->length = (size_t)length < sizeof message->text ? (size_t)length : sizeof message->text;
    memcpy(message->text, text, message->length);
}

/* Add the parts of a file that are mapped with all of these flags. */
static void add_ranges(const struct dl_phdr_info *info, Object *object, ElfW(Word) flags) {
    for (int i = 0; i < info->dlpi_phnum && object->count < MAX_RANGES; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type == PT_LOAD && (header->p_flags & flags) == flags) {
            uintptr_t start = info->dlpi_addr + header->p_vaddr;
            object->ranges[object->count++] = (Range){start, start + header->p_memsz};
        }
    }
}

static int add_object(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size, (void)unused;
    const char *name = strrchr(info->dlpi_name, '/'), *path = info->dlpi_name;
    name = name ? name + 1 : path;
    if (strstr(path, "jaxlib/")) {
        add_ranges(info, &jaxlib, PF_X);
        add_ranges(info, &jaxlib_files, 0);
    } else if (!*path || strstr(name, "libpython")) /* the program itself has no name */
        add_ranges(info, &python, PF_X);
    return 0;
}

static PyObject *install(PyObject *module, PyObject *arguments) {
    (void)module;
    const char *lost, *taken;
    Py_ssize_t lost_length, taken_length;
    if (!PyArg_ParseTuple(arguments, "s#s#i", &lost, &lost_length, &taken, &taken_length, &exit_code))
        return NULL;
    set_message(&lost_message, lost, lost_length);
    set_message(&taken_message, taken, taken_length);
    if (copy_pipe[0] < 0 && pipe2(copy_pipe, O_CLOEXEC | O_NONBLOCK))
        copy_pipe[0] = copy_pipe[1] = -1;

    jaxlib.count = jaxlib_files.count = python.count = 0;
    dl_iterate_phdr(add_object, NULL);
    abort_address = (uintptr_t)dlsym(RTLD_DEFAULT, "abort");
    void *frame;
    backtrace(&frame, 1); /* loads its library now: inside the handler it could not */

    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handle_abort;
    sigemptyset(&action.sa_mask);
    sigaction(SIGABRT, &action, NULL);
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"install", install, METH_VARARGS, "install(lost, taken, exit_code)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_abort", "Exit with a message where JAX's runtime would abort.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__abort(void) {
    return PyModuleDef_Init(&definition);
}
