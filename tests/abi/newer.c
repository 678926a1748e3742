/* The calls that came after Debian 12's release (IBVERBS_1.15 to 1.18), looked up by version since no
 * installed header has them: those that do their work, and those that say that the card has nothing.
 * Build: cc -Wall -o newer newer.c -libverbs; run with LD_LIBRARY_PATH naming the library under test. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

enum { PAGE = 4096, LOCAL = IBV_ACCESS_LOCAL_WRITE };
enum { MASK_IOVA = 1, MASK_ADDR = 2, MASK_FD = 4, MASK_FD_OFFSET = 8, MASK_DMAH = 16, MASK_BUF = 32 };
/* IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC */
enum { ALLOW_CC_UNPROTECTED = 1 << 2 };

struct ibv_buf;

/* struct ibv_mr_init_attr; in its first release it ended before `buf`. */
struct mr_init_attr {
	size_t length;
	int access;
	uint64_t comp_mask, iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah;
	struct ibv_buf *buf;
};

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static int missing;

static void *at(const char *name, const char *node)
{
	void *found = dlvsym(RTLD_DEFAULT, name, node);

	if (!found) {
		fprintf(stderr, "%s@%s is missing\n", name, node);
		missing++;
	}
	return found;
}

static struct ibv_mr *(*reg_mr_ex)(struct ibv_pd *, struct mr_init_attr *);

static struct ibv_mr *reg(uint64_t mask, struct mr_init_attr attr)
{
	attr.comp_mask = mask;
	attr.access = LOCAL;
	return reg_mr_ex(pd, &attr);
}

static void regions(void *page)
{
	int fd = memfd_create("dma-buf", 0);
	struct mr_init_attr memory = { .length = PAGE, .addr = page, .iova = 0x10000 };
	struct mr_init_attr file = { .length = PAGE, .fd = fd, .fd_offset = PAGE, .iova = 0x20000 };
	struct ibv_mr *mr;

	mr = reg(MASK_ADDR, memory);
	CHECK(mr && mr->addr == page && mr->length == PAGE && mr->pd == pd && !ibv_dereg_mr(mr));
	mr = reg(MASK_ADDR | MASK_IOVA, memory);
	CHECK(mr && !ibv_dereg_mr(mr));
	CHECK(!ftruncate(fd, 2 * PAGE));
	mr = reg(MASK_FD | MASK_FD_OFFSET | MASK_IOVA, file);
	CHECK(mr && mr->length == PAGE && !ibv_dereg_mr(mr));
	CHECK(!reg(0, memory) && errno == EINVAL);
	CHECK(!reg(MASK_IOVA, memory) && errno == EINVAL);
	CHECK(!reg(MASK_FD | MASK_IOVA, file) && errno == EINVAL);
	CHECK(!reg(MASK_ADDR | MASK_FD | MASK_FD_OFFSET | MASK_IOVA, file) && errno == EINVAL);
	CHECK(!reg(MASK_ADDR | MASK_DMAH, memory) && errno == EOPNOTSUPP);
	CHECK(!reg(MASK_ADDR | 1ull << 40, memory) && errno == EOPNOTSUPP);
	CHECK(!reg_mr_ex(pd, NULL) && errno == EINVAL);
	close(fd);
}

static void buffers(void)
{
	void *(*alloc_buf)(struct ibv_pd *, size_t, struct ibv_buf **) = at("ibv_alloc_buf", "IBVERBS_1.17");
	void (*free_buf)(struct ibv_buf *) = at("ibv_free_buf", "IBVERBS_1.17");
	struct ibv_mr *(*reg_buf_mr)(struct ibv_pd *, struct ibv_buf *, void *, size_t, int) =
		at("ibv_reg_buf_mr", "IBVERBS_1.17");
	int (*export_fd)(struct ibv_buf *) = at("ibv_export_buf_dmabuf_fd", "IBVERBS_1.18");
	struct ibv_parent_domain_init_attr unprotected = { .pd = pd, .comp_mask = ALLOW_CC_UNPROTECTED };
	struct ibv_pd *other = ibv_alloc_parent_domain(ctx, &unprotected);
	struct ibv_buf *buf = NULL;
	struct ibv_mr *mr;
	char *addr;

	if (missing)
		return;
	addr = alloc_buf(pd, PAGE + 1, &buf);
	CHECK(addr && buf && !((uintptr_t)addr % PAGE));
	memset(addr, 1, PAGE + 1);
	mr = reg_buf_mr(pd, buf, addr + 1, PAGE, LOCAL);
	CHECK(mr && mr->addr == addr + 1 && mr->length == PAGE && !ibv_dereg_mr(mr));
	mr = reg(MASK_ADDR | MASK_BUF, (struct mr_init_attr){ .length = PAGE, .addr = addr, .buf = buf });
	CHECK(mr && !ibv_dereg_mr(mr));
	CHECK(!reg_buf_mr(pd, buf, addr + 2, PAGE, LOCAL) && errno == EINVAL);
	CHECK(!reg_buf_mr(pd, buf, addr - 1, PAGE, LOCAL) && errno == EINVAL);
	CHECK(!reg_buf_mr(other, buf, addr, PAGE, LOCAL) && errno == EINVAL);
	CHECK(!reg(MASK_BUF, (struct mr_init_attr){ .length = PAGE, .addr = addr, .buf = buf }) && errno == EINVAL);
	CHECK(export_fd(buf) == -1 && errno == ENODATA);
	free_buf(buf);
	free_buf(NULL);
	addr = alloc_buf(other, PAGE, &buf);
	mr = reg_buf_mr(other, buf, addr, PAGE, LOCAL);
	CHECK(addr && mr && !ibv_dereg_mr(mr));
	free_buf(buf);
	CHECK(!alloc_buf(pd, 0, &buf) && errno == EINVAL);
	CHECK(!alloc_buf(NULL, 1, &buf) && errno == EINVAL);
	CHECK(!ibv_dealloc_pd(other));
}

static void the_port(void)
{
	int (*speed)(struct ibv_context *, uint32_t, uint64_t *) = at("ibv_query_port_speed", "IBVERBS_1.16");
	const char *(*word)(int) = at("ibv_wr_opcode_str", "IBVERBS_PRIVATE_65");
	uint64_t hundreds_of_mb = 0;

	if (missing)
		return;
	CHECK(!speed(ctx, 1, &hundreds_of_mb) && hundreds_of_mb >= 10);
	CHECK(speed(ctx, 2, &hundreds_of_mb) == EINVAL && speed(ctx, 257, &hundreds_of_mb) == EINVAL);
	CHECK(speed(ctx, 1, NULL) == EINVAL);
	CHECK(!strcmp(word(IBV_WR_RDMA_READ), "rdma-read") && !strcmp(word(99), "unknown"));
}

/* DMA handles and completion counters. */
static void not_there(void)
{
	static const char *const calls[] = {
		"_ibv_query_comp_cntr_caps", "ibv_destroy_comp_cntr", "ibv_inc_comp_cntr", "ibv_inc_err_comp_cntr",
		"ibv_qp_attach_comp_cntr", "ibv_read_comp_cntr", "ibv_read_err_comp_cntr", "ibv_set_comp_cntr",
		"ibv_set_err_comp_cntr",
	};
	void *(*create)(struct ibv_context *, void *) = at("ibv_create_comp_cntr", "IBVERBS_1.18");
	void *(*alloc)(struct ibv_context *, void *) = at("ibv_alloc_dmah", "IBVERBS_1.15");
	int (*dealloc)(void *) = at("ibv_dealloc_dmah", "IBVERBS_1.15");
	int (*export_fd)(struct ibv_dm *) = at("ibv_dm_export_dmabuf_fd", "IBVERBS_1.16");
	size_t i;

	for (i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		int (*call)(void *, void *, void *) = at(calls[i], "IBVERBS_1.18");

		CHECK(call && call(NULL, NULL, NULL) == EOPNOTSUPP);
	}
	if (missing)
		return;
	CHECK(!create(ctx, NULL) && errno == EOPNOTSUPP);
	CHECK(!alloc(ctx, NULL) && errno == EOPNOTSUPP && dealloc(NULL) == EOPNOTSUPP);
	CHECK(export_fd(NULL) == -1 && errno == EOPNOTSUPP);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	void *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	ctx = ibv_open_device(list[0]);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(ctx);
	reg_mr_ex = at("ibv_reg_mr_ex", "IBVERBS_1.15");
	if (reg_mr_ex)
		regions(page);
	buffers();
	the_port();
	not_there();
	CHECK(!missing && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	if (!failures)
		printf("calls of later releases: all as promised\n");
	return failures != 0;
}
