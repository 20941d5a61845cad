/* What a process says before it is aborted. */
#ifndef PODSCALE_LASTWORDS_H
#define PODSCALE_LASTWORDS_H

#include <stddef.h>

/* From now on abort(), whoever calls it, writes these words to stderr and ends the process with this exit code. */
void last_words(const char *words, size_t length, int code);

#endif
