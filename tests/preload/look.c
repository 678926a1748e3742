/* The sysfs view of the device seen through libc: each family of calls that names files, from C.
 * Build: cc -Wall -o look look.c -libverbs -lpthread; run with LD_PRELOAD naming the library under test. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <infiniband/verbs.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../abi/check.h"

#define DEV "/dev/infiniband"
#define NODE DEV "/uverbs0"
#define CLASS "/sys/class/infiniband"
#define STAR CLASS "/star0"
#define PORT STAR "/ports/1"
#define REAL "/sys/devices/virtual/starverbs/card0/infiniband/star0"

static int is_node(mode_t mode, dev_t number)
{
	return S_ISCHR(mode) && (mode & 0666) == 0666 && number == makedev(231, 192);
}

/* The first line of a stream, which is closed. */
static const char *line(FILE *from)
{
	static char text[256];

	text[0] = 0;
	if (!from)
		return "(not open)";
	if (!fgets(text, sizeof(text), from))
		strcpy(text, "(empty)");
	fclose(from);
	text[strcspn(text, "\n")] = 0;
	return text;
}

static void what_files_are(void)
{
	struct stat st;
	struct statx sx;
	struct statvfs fs;
	int dir = open(DEV, O_RDONLY | O_DIRECTORY);

	CHECK(!stat(NODE, &st) && is_node(st.st_mode, st.st_rdev));
	CHECK(!lstat(NODE, &st) && is_node(st.st_mode, st.st_rdev));
	CHECK(!fstatat(dir, "uverbs0", &st, AT_SYMLINK_NOFOLLOW) && is_node(st.st_mode, st.st_rdev));
	CHECK(!statx(AT_FDCWD, NODE, 0, STATX_BASIC_STATS, &sx) &&
	      is_node(sx.stx_mode, makedev(sx.stx_rdev_major, sx.stx_rdev_minor)));
	CHECK(!stat(STAR, &st) && S_ISDIR(st.st_mode));
	CHECK(!lstat(STAR, &st) && S_ISLNK(st.st_mode));
	CHECK(!stat("/sys//class/./infiniband/star0/node_type", &st) && S_ISREG(st.st_mode));
	CHECK(stat(DEV "/rdma_cm", &st) == -1 && errno == ENOENT);
	CHECK(stat(CLASS "_mad", &st) == -1 && errno == ENOENT);
	CHECK(!statvfs(STAR, &fs));
	CHECK(!access(NODE, R_OK | W_OK) && !eaccess(NODE, R_OK | W_OK));
	CHECK(!faccessat(AT_FDCWD, PORT, R_OK | X_OK, AT_EACCESS) && !faccessat(dir, "uverbs0", R_OK, 0));
	CHECK(access(STAR "/nothing", F_OK) == -1 && errno == ENOENT);
	CHECK(!lstat(DEV "/..", &st) && S_ISDIR(st.st_mode) && !stat(CLASS "/..", &st) && S_ISDIR(st.st_mode));
	CHECK(!stat(DEV "/../null", &st) && S_ISCHR(st.st_mode) && !access(DEV "/uverbs0/../../null", R_OK));
	close(dir);
}

/* Whether a stream is of the node, and open for commands, of which none is taken. */
static int writes_to_node(FILE *stream)
{
	struct stat st;
	int taken = !stream || fstat(fileno(stream), &st) || !is_node(st.st_mode, st.st_rdev) ||
		    fputc('x', stream) != 'x' || fflush(stream) != EOF || errno != EBADF;

	if (stream)
		fclose(stream);
	return !taken;
}

static void opening(void)
{
	char byte;
	struct stat st;
	int fd = open(NODE, O_RDWR | O_CLOEXEC), dir;

	CHECK(fd >= 0 && !fstat(fd, &st) && is_node(st.st_mode, st.st_rdev));
	CHECK(write(fd, "x", 1) == -1 && errno == EBADF);
	CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC);
	close(fd);
	CHECK(open(STAR "/node_type", O_WRONLY) == -1 && errno == EACCES);
	CHECK(open(STAR "/node_type", O_RDONLY | O_TRUNC) == -1 && errno == EACCES);
	CHECK(open(DEV "/new", O_RDWR | O_CREAT, 0600) == -1 && errno == ENOENT);
	CHECK(!fopen(STAR "/node_type", "w") && errno == EACCES);
	CHECK(!strcmp(line(fopen(STAR "/node_type", "re")), "1: CA"));
	CHECK(writes_to_node(fopen(NODE, "w")) && writes_to_node(fopen(NODE, "r+e")));
	CHECK(writes_to_node(fopen(NODE, "a")) && writes_to_node(freopen(NODE, "r+", fopen("/dev/null", "r"))));
	CHECK(!strcmp(line(fopen(NODE, "r")), "(empty)"));
	CHECK(!strcmp(line(fopen(DEV "/../null", "r")), "(empty)") && !close(open(DEV "/../null", O_RDWR)));
	dir = open(PORT, O_PATH);
	fd = openat(dir, "state", O_RDONLY);
	CHECK(!strcmp(line(fdopen(fd, "r")), "4: ACTIVE"));
	CHECK(pread(fd, &byte, 1, 0) == -1 && errno == EBADF);
	CHECK(!strcmp(line(freopen(PORT "/link_layer", "r", fopen("/dev/null", "r"))), "Ethernet"));
	CHECK(!freopen(STAR "/node_type", "r+", fopen("/dev/null", "r")) && errno == EACCES);
	close(dir);
}

static int stars(const struct dirent *entry)
{
	return !strcmp(entry->d_name, "star0");
}

static void listing(void)
{
	struct dirent *entry, **list = NULL;
	int nodes = 0;
	glob_t found;
	DIR *dir = opendir(DEV);

	while (dir && (entry = readdir(dir)))
		if (entry->d_name[0] != '.')
			nodes += !strcmp(entry->d_name, "uverbs0") && entry->d_type == DT_CHR ? 1 : 100;
	CHECK(nodes == 1);
	closedir(dir);
	CHECK(scandir(CLASS, &list, stars, alphasort) == 1 && !strcmp(list[0]->d_name, "star0"));
	free(list[0]);
	free(list);
	CHECK(!glob(CLASS "/*/ports/*/sta[t]e", 0, NULL, &found) && found.gl_pathc == 1);
	CHECK(!strcmp(found.gl_pathv[0], PORT "/state"));
	CHECK(!glob("/dev/nul[l]", GLOB_APPEND, NULL, &found) && found.gl_pathc == 2);
	globfree(&found);
}

static void links(void)
{
	char path[PATH_MAX];
	char *canonical = realpath(STAR, NULL);
	ssize_t n = readlink(STAR, path, sizeof(path));

	CHECK(n > 0 && !strncmp(path, "../../devices/virtual/starverbs", 31));
	CHECK(canonical && !strcmp(canonical, REAL));
	free(canonical);
	canonical = canonicalize_file_name(STAR "/device/infiniband/star0");
	CHECK(canonical && !strcmp(canonical, REAL));
	free(canonical);
	CHECK(realpath(STAR "/subsystem", path) && !strcmp(path, CLASS));
	CHECK(realpath(STAR "/device/net/lo", path) && !strcmp(path, "/sys/devices/virtual/net/lo"));
	CHECK(!chdir(STAR) && getcwd(path, sizeof(path)) && !strcmp(path, REAL));
	/* Room for what is shown is enough, though what lies behind it is longer. */
	CHECK((n = readlink("/proc/self/cwd", path, sizeof(REAL) + 1)) == strlen(REAL) && !memcmp(path, REAL, n));
	CHECK(readlink("/proc/self/cwd", path, 12) == 12 && !memcmp(path, REAL, 12));
	CHECK(getcwd(path, sizeof(REAL)) && !strcmp(path, REAL));
	CHECK((canonical = getcwd(NULL, sizeof(REAL))) && !strcmp(canonical, REAL));
	free(canonical);
	CHECK(!getcwd(path, sizeof(REAL) - 1) && errno == ERANGE);
	CHECK(!strcmp(line(fopen("ports/1/phys_state", "r")), "5: LinkUp"));
	CHECK(!chdir("/"));
}

/* A number that the card counts is that of now, however one gets there. */
static void counters(void)
{
	static char memory[4096];
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *ctx = ibv_open_device(list[0]);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
	int dir = open(PORT, O_RDONLY | O_DIRECTORY);

	CHECK(mr && atoi(line(fopen(PORT "/hw_counters/mrs", "r"))) >= 1);
	CHECK(atoi(line(fdopen(openat(dir, "hw_counters/mrs", O_RDONLY), "r"))) >= 1);
	CHECK(!strcmp(line(fopen(PORT "/counters/symbol_error", "r")), "0"));
	close(dir);
	ibv_dereg_mr(mr);
	ibv_dealloc_pd(pd);
	ibv_close_device(ctx);
	ibv_free_device_list(list);
}

ssize_t __readlink_chk(const char *path, char *to, size_t size, size_t room);
ssize_t __readlinkat_chk(int dir, const char *path, char *to, size_t size, size_t room);
char *__realpath_chk(const char *path, char *to, size_t room);
char *__getcwd_chk(char *to, size_t size, size_t room);
int __open_2(const char *path, int flags);
int __openat_2(int dir, const char *path, int flags);

/* The calls that _FORTIFY_SOURCE makes, each as it may not be made. */
static int misuse(int number)
{
	char to[PATH_MAX];

	switch (number) {
	case 0:
		return __readlink_chk("/proc/self/exe", to, 9, 8) > 0;
	case 1:
		return __readlinkat_chk(AT_FDCWD, "/proc/self/exe", to, 9, 8) > 0;
	case 2:
		return !!__realpath_chk("/", to, 8);
	case 3:
		return !!__getcwd_chk(to, 9, 8);
	case 4:
		return __open_2("/dev/null", O_WRONLY | O_CREAT);
	default:
		return __openat_2(AT_FDCWD, "/dev/null", O_WRONLY | O_CREAT);
	}
}

/* libc's checks still end who fails them. */
static void fortified(void)
{
	int status;

	for (int number = 0; number <= 5; number++) {
		if (!fork()) {
			close(2);
			exit(misuse(number));
		}
		CHECK(wait(&status) > 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
	}
}

/* A folder of the program's is called as $PWD does, where that is right. */
static void folders_by_their_links(void)
{
	char here[] = "/tmp/starverbs-look-XXXXXX", *name;

	CHECK(mkdtemp(here) && !rmdir(here) && !symlink("/usr", here));
	CHECK(!chdir(here) && !setenv("PWD", here, 1));
	CHECK((name = get_current_dir_name()) && !strcmp(name, here));
	free(name);
	CHECK(!setenv("PWD", "/", 1) && (name = get_current_dir_name()) && !strcmp(name, "/usr"));
	free(name);
	CHECK(!chdir(STAR) && (name = get_current_dir_name()) && !strcmp(name, REAL));
	free(name);
	CHECK(!unlink(here) && !chdir("/"));
}

/* Calls with other paths are libc's. */
static void the_rest(void)
{
	struct stat st;
	char path[PATH_MAX];
	const char *volatile null = NULL;

	CHECK(stat(null, &st) == -1 && errno == EFAULT);
	CHECK(stat("", &st) == -1 && errno == ENOENT);
	CHECK(!stat("/dev/null", &st) && st.st_rdev == makedev(1, 3));
	CHECK(!access("/sys/class/net/lo/address", R_OK));
	CHECK(!access(CLASS "/../infiniband_verbs/abi_version", R_OK) && !access(STAR "/../../vendor", R_OK));
	CHECK(realpath("/sys/class/net/lo/..", path) && !strcmp(path, "/sys/devices/virtual/net"));
	errno = 77;
	(void)!access(NODE, R_OK);
	if (errno != 77)
		failures++, fprintf(stderr, "errno changed to %d\n", errno);
}

static void *look(void *unused)
{
	struct stat st;

	for (int i = 0; i < 200; i++) {
		if (stat(NODE, &st) || !S_ISCHR(st.st_mode))
			return "stat";
		int fd = open(STAR "/fw_ver", O_RDONLY);
		if (fd < 0 || read(fd, &st, 1) != 1 || close(fd))
			return "open";
	}
	return unused;
}

/* Threads share the view; a child that closes everything finds its own way. */
static void threads_and_children(void)
{
	pthread_t threads[8];
	void *wrong;
	int status;

	for (int i = 0; i < 8; i++)
		pthread_create(&threads[i], NULL, look, NULL);
	for (int i = 0; i < 8; i++)
		CHECK(!pthread_join(threads[i], &wrong) && !wrong);
	if (!fork()) {
		close_range(3, ~0U, 0);
		exit(look(NULL) != NULL);
	}
	CHECK(wait(&status) > 0 && !status);
	CHECK(!look(NULL));
}

/* Who drops root's privileges after a look sees the device still, and so does who takes them back. */
static void other_users(void)
{
	int status;

	if (geteuid())
		return;
	if (!fork()) {
		if (look(NULL) || seteuid(65534) || look(NULL) || seteuid(0) || look(NULL))
			exit(1);
		exit(setuid(65534) || look(NULL) || access(NODE, R_OK | W_OK));
	}
	CHECK(wait(&status) > 0 && !status);
}

int main(void)
{
	what_files_are();
	opening();
	listing();
	links();
	counters();
	folders_by_their_links();
	fortified();
	the_rest();
	threads_and_children();
	other_users();
	if (!failures)
		puts("look: all as it should be");
	return failures != 0;
}
