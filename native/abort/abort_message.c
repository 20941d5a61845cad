/* Replace the abort of a process that has lost its peers by one sentence and an exit code.
 *
 * JAX's runtime ends such a process by abort() in one of its own background threads, where Python cannot intervene. The
 * handler distinguishes that abort from all others by the stack: abort() was called by jaxlib itself, not by the C
 * library that found a corrupt heap, and no Python frame lies below it. Any other abort keeps its default effect.
 *
 * Nothing in the handler takes a lock: the address ranges are looked up when it is installed.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

enum { MAX_FRAMES = 64, MAX_RANGES = 128, ABORT_BYTES = 1024 };

typedef struct {
    uintptr_t start, stop;
} Range;

typedef struct {
    Range ranges[MAX_RANGES];
    int count;
} Object;

static char message[1024];
static size_t message_length;
static int exit_code;
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

static void handle_abort(int number) {
    if (!is_peer_lost()) {
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    for (size_t done = 0; done < message_length;) {
        ssize_t written = write(STDERR_FILENO, message + done, message_length - done);
        if (written <= 0)
            break;
        done += (size_t)written;
    }
    _exit(exit_code);
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
    const char *text;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(arguments, "s#i", &text, &length, &exit_code))
        return NULL;
    message_length = (size_t)length < sizeof message ? (size_t)length : sizeof message;
    memcpy(message, text, message_length);

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
    {"install", install, METH_VARARGS, "install(message, exit_code)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_abort", "Exit with a message where JAX's runtime would abort.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__abort(void) {
    return PyModuleDef_Init(&definition);
}
