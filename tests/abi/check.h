/* What the C programs here share: a check that counts. */
#include <errno.h>
#include <stdio.h>

static int failures;

#define CHECK(what)                                                                    \
	do {                                                                           \
		errno = 0;                                                             \
		if (!(what)) {                                                         \
			failures++;                                                    \
			fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #what, errno); \
		}                                                                      \
	} while (0)
