/* Replace the abort of a process that has lost its peers by one sentence and an exit code.
 *
 * JAX's runtime ends such a process by abort() in one of its own background threads, where Python cannot intervene. The
 * handler distinguishes that abort from all others by the stack: abort() was called by jaxlib itself, not by the C
 * library that found a corrupt heap, and no Python frame lies below it. Any other abort keeps its default effect.
 *
 * Why it aborts, jaxlib only logs. One cause is recognized by the text of that log message, which the stack of
 * the aborting thread points to: a second process has joined with a number that is taken. Memory is read through a pipe,
 * because the kernel refuses to copy what is not mapped, where an ordinary read would crash.
 *
 * Nothing in the handler takes a lock: the address ranges are looked up when it is installed.
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
#include <string.h>
#include <unistd.h>

enum { MAX_FRAMES = 64, MAX_RANGES = 128, ABORT_BYTES = 1024, STACK_WORDS = 4096, COPY_BYTES = 16384 };

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

static const char TAKEN[] = "unexpectedly tried to connect";
static Message lost_message, taken_message;
static int exit_code, copy_pipe[2] = {-1, -1};
static char copied[COPY_BYTES];
static Object jaxlib, python;
static uintptr_t abort_address;

static int contains(const Object *object, uintptr_t address) {
    for (int i = 0; i < object->count; i++)
        if (address >= object->ranges[i].start && address < object->ranges[i].stop)
            return 1;
    return 0;
}

/* Return whether jaxlib called abort() in a thread that runs no Python. */
static int is_peer_lost(void) {
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

/* Copy up to COPY_BYTES that begin at an address, which need not be mapped; return how many there are. */
static size_t copy_memory(uintptr_t address) {
    ssize_t written = write(copy_pipe[1], (const void *)address, COPY_BYTES);
    size_t count = 0;
    while (written > 0 && count < (size_t)written) {
        ssize_t taken = read(copy_pipe[0], copied + count, (size_t)written - count);
        if (taken <= 0)
            return count;
        count += (size_t)taken;
    }
    return count;
}

/* Return whether memory that this thread's stack points to holds the text of a number that is taken. */
static int is_number_taken(void) {
    volatile uintptr_t here = 0;
    uintptr_t start = (uintptr_t)&here, before = 0;
    for (size_t i = 0; i < STACK_WORDS; i++) {
        uintptr_t word;
        if (copy_memory(start + i * sizeof word) < sizeof word)
            return 0; /* the end of the stack */
        memcpy(&word, copied, sizeof word);
        if (word < 4096 || word == before || word % sizeof word || contains(&jaxlib, word))
            continue;
        before = word;
        if (memmem(copied, copy_memory(word), TAKEN, sizeof TAKEN - 1))
            return 1;
    }
    return 0;
}

static void handle_abort(int number) {
    if (!is_peer_lost()) {
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    const Message *message = copy_pipe[0] >= 0 && is_number_taken() ? &taken_message : &lost_message;
    for (size_t done = 0; done < message->length;) {
        ssize_t written = write(STDERR_FILENO, message->text + done, message->length - done);
        if (written <= 0)
            break;
        done += (size_t)written;
    }
    _exit(exit_code);
}

static void set_message(Message *message, const char *text, Py_ssize_t length) {
    message->length = (size_t)length < sizeof message->text ? (size_t)length : sizeof message->text;
    memcpy(message->text, text, message->length);
}

static void add_ranges(const struct dl_phdr_info *info, Object *object) {
    for (int i = 0; i < info->dlpi_phnum && object->count < MAX_RANGES; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type == PT_LOAD && header->p_flags & PF_X) {
            uintptr_t start = info->dlpi_addr + header->p_vaddr;
            object->ranges[object->count++] = (Range){start, start + header->p_memsz};
        }
    }
}

static int add_object(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size, (void)unused;
    const char *name = strrchr(info->dlpi_name, '/'), *path = info->dlpi_name;
    name = name ? name + 1 : path;
    if (strstr(path, "jaxlib/"))
        add_ranges(info, &jaxlib);
    else if (!*path || strstr(name, "libpython")) /* the program itself has no name */
        add_ranges(info, &python);
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

    jaxlib.count = python.count = 0;
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
