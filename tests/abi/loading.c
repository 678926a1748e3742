/* Others' libraries on the library under test: each is opened with every symbol bound, none brings a
 * libibverbs of its own, and drivers that register are accepted without a device of theirs appearing. Then
 * every command of the private interface is called, by the names in a file ("NAME NODE" a line): it must
 * exist, and say that nothing is offered.
 * With --which, on the system's libibverbs: says which of the libraries open at all. Some need
 * what another has to load first.
 * usage: loading NAMES LIBRARY... | loading --which LIBRARY... */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <string.h>

#include "check.h"

static int copies(struct dl_phdr_info *info, size_t size, void *count)
{
	(void)size;
	*(int *)count += strstr(info->dlpi_name, "/libibverbs.so.1") != NULL;
	return 0;
}

static void library(const char *path)
{
	int count = 0;

	if (!dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
		failures++;
		fprintf(stderr, "%s\n", dlerror());
	}
	dl_iterate_phdr(copies, &count);
	CHECK(count == 1);
}

/* As `library` does, so that the same must open later. */
static int which(int count, char **paths)
{
	dlopen("libibverbs.so.1", RTLD_NOW | RTLD_GLOBAL);
	for (int i = 0; i < count; i++) {
		if (dlopen(paths[i], RTLD_NOW | RTLD_LOCAL))
			puts(paths[i]);
		else
			fprintf(stderr, "skipped, does not open on the system's libibverbs: %s\n", dlerror());
	}
	return 0;
}

/* Their conventions differ: an errno value, or -1 and errno. */
static void command(void *lib, const char *name, const char *node)
{
	int (*call)(void *, void *, void *, void *, void *, void *) = dlvsym(lib, name, node);
	int answer;

	if (!call) {
		failures++;
		fprintf(stderr, "%s\n", dlerror());
		return;
	}
	if (strncmp(name, "ibv_cmd_", 8))
		return;
	errno = 0;
	answer = call(NULL, NULL, NULL, NULL, NULL, NULL);
	if (answer != EOPNOTSUPP && !(answer == -1 && errno == EOPNOTSUPP)) {
		failures++;
		fprintf(stderr, "%s@%s: %d\n", name, node, answer);
	}
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "--which"))
		return which(argc - 2, argv + 2);
	void *lib = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_GLOBAL);
	FILE *file = argc > 1 ? fopen(argv[1], "r") : NULL;
	char name[64], node[64];
	int i, devices, names = 0;

	if (!lib || !file) {
		fprintf(stderr, "no library under test, or no file of names\n");
		return 1;
	}
	for (i = 2; i < argc; i++)
		library(argv[i]);
	void **(*list)(int *) = dlsym(lib, "ibv_get_device_list");
	void (*free_list)(void **) = dlsym(lib, "ibv_free_device_list");
	void **all = list ? list(&devices) : NULL;
	CHECK(all && devices == 1 && all[0] && !all[1]);
	if (free_list)
		free_list(all);
	for (; fscanf(file, "%63s %63s", name, node) == 2; names++)
		command(lib, name, node);
	fclose(file);
	printf("%d libraries loaded, %d private symbols resolved, %d failures\n", argc - 2, names, failures);
	return failures || !names;
}
