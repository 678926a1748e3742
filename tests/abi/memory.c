/* The memory verbs seen from C: return values, errno, public fields, and handles that are imported.
 * Build: cc -Wall -o memory memory.c -libverbs; run with LD_LIBRARY_PATH naming the library under test. */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

enum { PAGE = 4096, LOCAL = IBV_ACCESS_LOCAL_WRITE,
	REMOTE = LOCAL | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static char *page;

static void capabilities(void)
{
	struct ibv_device_attr_ex ex;
	uint32_t ud = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV;
	/* IBV_ODP_SUPPORT_FLUSH and IBV_ODP_SUPPORT_ATOMIC_WRITE of later releases */
	uint32_t placement = 1 << 6 | 1 << 7, uc = ud | IBV_ODP_SUPPORT_WRITE;
	uint32_t rc = uc | IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_ATOMIC | placement;

	CHECK(!ibv_query_device_ex(ctx, NULL, &ex) && ex.max_dm_size >= 1 << 20);
	CHECK(ex.odp_caps.general_caps == (IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT));
	CHECK(ex.odp_caps.per_transport_caps.rc_odp_caps == rc && ex.odp_caps.per_transport_caps.uc_odp_caps == uc);
	CHECK(ex.odp_caps.per_transport_caps.ud_odp_caps == ud);
	CHECK(ibv_is_fork_initialized() == IBV_FORK_UNNEEDED && !ibv_fork_init());
}

static void changes(void)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, page, PAGE, LOCAL), *null = ibv_alloc_null_mr(pd);
	struct ibv_pd *other = ibv_alloc_pd(ctx);
	uint32_t key = mr->lkey;

#define INPUT(flags, pd, addr, length, access) \
	CHECK(ibv_rereg_mr(mr, flags, pd, addr, length, access) == IBV_REREG_MR_ERR_INPUT && errno == EINVAL)
	INPUT(0, NULL, NULL, 0, 0);
	INPUT(8, NULL, NULL, 0, 0);
	INPUT(IBV_REREG_MR_CHANGE_TRANSLATION, NULL, NULL, PAGE, 0);
	INPUT(IBV_REREG_MR_CHANGE_TRANSLATION, NULL, page, 0, 0);
	INPUT(IBV_REREG_MR_CHANGE_PD, NULL, NULL, 0, 0);
	INPUT(IBV_REREG_MR_CHANGE_PD, other, NULL, 0, LOCAL);
	CHECK(ibv_rereg_mr(NULL, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, LOCAL) == IBV_REREG_MR_ERR_INPUT);
	CHECK(null && !null->addr && null->length == SIZE_MAX && null->lkey && !null->rkey);
	CHECK(ibv_rereg_mr(null, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, LOCAL) == IBV_REREG_MR_ERR_INPUT);
	CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE) ==
		      IBV_REREG_MR_ERR_CMD && errno == EINVAL);
	CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, (void *)64, 64, 0) == IBV_REREG_MR_ERR_CMD &&
	      errno == EFAULT);
	CHECK(mr->addr == page && mr->length == PAGE && mr->pd == pd && mr->lkey == key);
	CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_FLAGS_SUPPORTED, other, page + 64, 64, REMOTE));
	CHECK(mr->addr == page + 64 && mr->length == 64 && mr->pd == other && mr->lkey == key && mr->rkey == key);
	CHECK(ibv_dealloc_pd(other) == EBUSY);
	CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, pd, NULL, 0, 0) && !ibv_dealloc_pd(other));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dereg_mr(null));
}

static void on_demand(void)
{
	struct ibv_mr *all = ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND | REMOTE);
	struct ibv_mr *plain = ibv_reg_mr(pd, page, PAGE, LOCAL | IBV_ACCESS_RELAXED_ORDERING | 1 << 25);
	struct ibv_sge sge = { (uintptr_t)page, PAGE, all ? all->lkey : 0 };
	enum ibv_advise_mr_advice write = IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE;

	CHECK(all && all->length == SIZE_MAX && plain);
	CHECK(!ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1));
	CHECK(!ibv_advise_mr(pd, write, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1));
	CHECK(ibv_advise_mr(pd, 77, 0, &sge, 1) == EOPNOTSUPP && ibv_advise_mr(pd, write, 2, &sge, 1) == EINVAL);
	CHECK(ibv_advise_mr(pd, write, 0, NULL, 1) == EINVAL && ibv_advise_mr(pd, write, 0, &sge, 0) == EINVAL);
	sge.addr = 64;
	CHECK(ibv_advise_mr(pd, write, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1) == EFAULT);
	sge = (struct ibv_sge){ (uintptr_t)page, PAGE, plain->lkey };
	CHECK(ibv_advise_mr(pd, write, 0, &sge, 1) == EINVAL);
	CHECK(!ibv_reg_mr(pd, NULL, SIZE_MAX, LOCAL) && errno == EFAULT);
	CHECK(!ibv_dereg_mr(all) && !ibv_dereg_mr(plain));
}

static void descriptors(void)
{
	int fd = memfd_create("dma-buf", 0), none[2];
	struct ibv_mr *mr;

	CHECK(fd >= 0 && !ftruncate(fd, 2 * PAGE) && !pipe(none));
	mr = ibv_reg_dmabuf_mr(pd, PAGE + 8, 64, 8, fd, REMOTE);
	CHECK(mr && mr->length == 64 && !mr->addr && mr->lkey);
	CHECK(!ibv_reg_dmabuf_mr(pd, PAGE, 64, 8, fd, REMOTE) && errno == EINVAL);
	CHECK(!ibv_reg_dmabuf_mr(pd, 0, 64, 0, fd, IBV_ACCESS_ZERO_BASED) && errno == EINVAL);
	CHECK(!ibv_reg_dmabuf_mr(pd, 0, 64, 0, none[0], REMOTE) && errno == EOPNOTSUPP);
	CHECK(!ibv_dereg_mr(mr) && !close(fd) && !close(none[0]) && !close(none[1]));
}

static void device_memory(void)
{
	struct ibv_alloc_dm_attr attr = { .length = 128, .log_align_req = 6 }, bad = { .length = 8, .comp_mask = 1 };
	struct ibv_alloc_dm_attr huge = { .length = (size_t)1 << 40 };
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &attr), *same = NULL;
	struct ibv_mr *mr = ibv_reg_dm_mr(pd, dm, 64, 64, IBV_ACCESS_ZERO_BASED | REMOTE);
	struct ibv_context *again = ibv_import_device(dup(ctx->cmd_fd));
	char text[8] = "in card";
	int status;

	CHECK(dm && dm->context == ctx && dm->handle && mr && mr->length == 64 && !mr->addr);
	CHECK(!ibv_alloc_dm(ctx, &bad) && errno == EINVAL);
	CHECK(!ibv_alloc_dm(ctx, &huge) && errno == ENOMEM);
	CHECK(!ibv_reg_dm_mr(pd, dm, 64, 65, IBV_ACCESS_ZERO_BASED) && errno == EINVAL);
	CHECK(!ibv_reg_dm_mr(pd, dm, 0, 64, REMOTE) && errno == EINVAL);
	CHECK(!ibv_memcpy_to_dm(dm, 120, text, 8) && ibv_memcpy_to_dm(dm, 124, text, 8) == EFAULT);
	CHECK(ibv_memcpy_from_dm(text, dm, 1, 4) == EINVAL && ibv_memcpy_from_dm(NULL, dm, 0, 4) == EINVAL);
	CHECK(again && (same = ibv_import_dm(again, dm->handle)) && same->context == again);
	memset(text, 0, 8);
	CHECK(!ibv_memcpy_from_dm(text, same, 120, 8) && !strcmp(text, "in card"));
	ibv_unimport_dm(same);
	CHECK(!ibv_import_dm(again, 12345) && errno == EINVAL && !ibv_close_device(again));
	if (!fork()) {
		/* A forked child shares device memory and may have more, but not the card. */
		struct ibv_dm *own = ibv_alloc_dm(ctx, &attr);

		CHECK(!ibv_memcpy_to_dm(dm, 120, "child!!", 8));
		CHECK(own && !ibv_memcpy_to_dm(own, 0, text, 8) && !ibv_free_dm(own));
		CHECK(!ibv_reg_mr(pd, page, PAGE, LOCAL) && errno == EIO);
		_exit(failures != 0);
	}
	CHECK(wait(&status) > 0 && status == 0);
	CHECK(!ibv_memcpy_from_dm(text, dm, 120, 8) && !strcmp(text, "child!!"));
	CHECK(ibv_free_dm(dm) == EBUSY && !ibv_dereg_mr(mr) && !ibv_free_dm(dm));
}

/* A queue pair on imported handles works with a region of the first context; its events come to either. */
static void imports(void)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, page, PAGE, REMOTE), *mr2;
	struct ibv_context *again = ibv_import_device(dup(ctx->cmd_fd));
	struct ibv_pd *pd2 = ibv_import_pd(again, pd->handle);
	struct ibv_cq *cq = ibv_create_cq(again, 16, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp *a, *b;
	struct ibv_sge sge = { (uintptr_t)page, 8, 0 };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_async_event event;
	struct pollfd fd = { .fd = ctx->async_fd, .events = POLLIN };
	struct ibv_wc wc;

	CHECK(again && pd2 && pd2->context == again && pd2->handle == pd->handle && cq);
	CHECK((mr2 = ibv_import_mr(pd2, mr->handle)) && mr2->lkey == mr->lkey && mr2->rkey == mr->rkey &&
	      !mr2->addr);
	CHECK(!ibv_import_mr(pd2, mr->handle ^ 1) && errno == EINVAL);
	CHECK(!ibv_import_pd(again, 99999) && errno == EINVAL);
	CHECK(!ibv_import_device(-1) && errno == EBADF);
	CHECK(!ibv_import_device(0) && errno == EINVAL);
	a = ibv_create_qp(pd2, &init);
	b = ibv_create_qp(pd2, &init);
	CHECK(a && b && !connect_rc(a, b->qp_num) && !connect_rc(b, a->qp_num));
	strcpy(page, "shared");
	sge.lkey = mr2->lkey;
	wr.wr.rdma.remote_addr = (uintptr_t)page + 512;
	wr.wr.rdma.rkey = mr2->rkey;
	CHECK(!ibv_post_send(a, &wr, &bad));
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS && !strcmp(page + 512, "shared"));
	wr.wr.rdma.rkey ^= 0x100;
	CHECK(!ibv_post_send(a, &wr, &bad));
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_REM_ACCESS_ERR && poll(&fd, 1, 5000) == 1);
	CHECK(!ibv_get_async_event(ctx, &event) && event.element.qp == b);
	ibv_ack_async_event(&event);
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_qp(b) && !ibv_destroy_cq(cq));
	ibv_unimport_mr(mr2);
	ibv_unimport_pd(pd2);
	CHECK(!ibv_close_device(again) && !ibv_dereg_mr(mr));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	alarm(60);
	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx))) {
		perror("opening the card");
		return 1;
	}
	ibv_free_device_list(list);
	page = aligned_alloc(PAGE, PAGE);
	memset(page, 0, PAGE);
	capabilities();
	changes();
	on_demand();
	descriptors();
	device_memory();
	imports();
	CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	free(page);
	if (!failures)
		puts("memory: all as promised");
	return failures != 0;
}
