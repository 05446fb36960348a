/* Checks of the test programs, which exit with status 1 at the first that fails. */

#ifndef CHECK_H
#define CHECK_H

#include <doorbell.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not so: %s; last error: %s\n", __FILE__, __LINE__, #condition, \
                    doorbell_last_error());                                                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define OK(call) EXPECT((call) == DOORBELL_OK)

/* The call fails with this status, and the text of the last error has this in it. */
#define FAILS(call, status, words)                                                                 \
    do {                                                                                           \
        EXPECT((call) == (status));                                                                \
        EXPECT(*doorbell_last_error() && strstr(doorbell_last_error(), (words)));                  \
        EXPECT(strchr(doorbell_last_error(), '\n') == NULL);                                       \
    } while (0)

#endif
