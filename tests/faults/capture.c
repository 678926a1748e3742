/* A capture (STARVERBS_PCAP) that cannot go on: the file's limit (RLIMIT_FSIZE), a full disk, a reader
 * who goes away, with standard error as broken. The program's messages go on, and no signal reaches it.
 * usage: capture full|limit|pipe */
#include "faults.h"
#include <sys/resource.h>

int main(int argc, char **argv)
{
	static struct side a;
	struct peer self;
	int reader = -1;

	NEED(argc == 2);
	alarm(60);
	if (!strcmp(argv[1], "limit")) {
		struct rlimit size = { 20000, RLIM_INFINITY };

		NEED(setrlimit(RLIMIT_FSIZE, &size) == 0);
	}
	if (!strcmp(argv[1], "pipe"))
		NEED((reader = open(getenv("STARVERBS_PCAP"), O_RDONLY | O_NONBLOCK)) >= 0);
	open_side(&a);
	self = describe(&a, a.qp);
	NEED(connect_to(a.qp, &self, 14, 7) == 0);
	NEED(one(&a, &self) == IBV_WC_SUCCESS);
	if (reader >= 0)
		close(reader);
	for (int i = 0; i < 2000; i++)
		NEED(one(&a, &self) == IBV_WC_SUCCESS);
	NEED(ibv_destroy_qp(a.qp) == 0);
	printf("capture, %s: 2000 messages\n", argv[1]);
	return 0;
}
