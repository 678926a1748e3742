/* Sends that the kernel refuses (refuse.c is preloaded): every tenth or so, or all for a while,
 * with each of the errors that sendmsg(2) knows. The connection goes on, or gives up in bounded
 * time if nothing can be sent any more. */
#include "faults.h"
#include <sys/mman.h>

int main(void)
{
	static const int errors[] = { ENOBUFS, EAGAIN, ENOMEM, EPERM, ENETUNREACH, EHOSTUNREACH, ENETDOWN, EINTR,
				      EINVAL, EIO, EMSGSIZE, ECONNREFUSED, EADDRNOTAVAIL };
	static struct side s;
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	struct ibv_wc wc;
	struct peer self;
	volatile int32_t *how;
	int fd = open(getenv("REFUSE"), O_RDWR);
	long begin, longest = 0;

	alarm(120);
	NEED(fd >= 0 && ftruncate(fd, 8) == 0);
	NEED((how = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) != MAP_FAILED);
	open_side(&s);
	self = describe(&s, s.qp);
	for (unsigned int e = 0; e < sizeof(errors) / sizeof(errors[0]); e++) {
		/* a tenth */
		NEED(connect_to(s.qp, &self, 14, 7) == 0);
		how[1] = 26;
		how[0] = errors[e];
		for (int i = 0; i < 10; i++) {
			for (int k = 0; k < 16; k++)
				NEED(post(&s, &self, k % 3 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, 20000, k) == 0);
			for (int k = 0; k < 16; k++)
				NEED(next_status(&s, &wc) == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)k);
		}
		how[0] = 0;
		/* all of them; a call that a signal interrupts is repeated,
		 * and nothing else can become of it */
		NEED(ibv_modify_qp(s.qp, &reset, IBV_QP_STATE) == 0);
		if (errors[e] == EINTR)
			continue;
		NEED(connect_to(s.qp, &self, 10, 2) == 0);
		NEED(one(&s, &self) == IBV_WC_SUCCESS);
		how[1] = 256;
		how[0] = errors[e];
		begin = now_ms();
		for (int k = 0; k < 4; k++)
			NEED(post(&s, &self, IBV_WR_RDMA_WRITE, 20000, k) == 0);
		for (int k = 0; k < 4; k++)
			NEED(next_status(&s, &wc) == (k ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR));
		longest = now_ms() - begin > longest ? now_ms() - begin : longest;
		how[0] = 0;
		NEED(ibv_modify_qp(s.qp, &reset, IBV_QP_STATE) == 0);
	}
	printf("sends refused: %zu errors, some and all; retries exceeded after %ld ms at most\n",
	       sizeof(errors) / sizeof(errors[0]), longest);
	return 0;
}
