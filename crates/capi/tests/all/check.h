/* What the tests in C expect: the first that does not hold ends the program. */
#ifndef CHECK_H
#define CHECK_H

#include <netmem.h>
#include <stdio.h>
#include <stdlib.h>

#define IS(status, call) is(status, call, #call, __LINE__)

static inline void is(netmem_status expected, netmem_status found, const char *call, int line) {
    if (found != expected || (found != NETMEM_OK && netmem_error_text()[0] == '\0')) {
        printf("%d: %s: %s, expected %s (%s)\n", line, call, netmem_status_name(found), netmem_status_name(expected), netmem_error_text());
        exit(1);
    }
}

#define HOLDS(what) holds(what, #what, __LINE__)

static inline void holds(bool it, const char *what, int line) {
    if (!it) {
        printf("%d: not so: %s (%s)\n", line, what, netmem_error_text());
        exit(1);
    }
}

#endif
