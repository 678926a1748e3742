/*
 * Kernels that are modules, through the C ABI: what they answer, one that takes the place of another while
 * RPCs come, and what hostile ones can do: fail.
 * usage: module none | module serve | module HOSTILE SENDER FILTER...
 */
#include "../abi/check.h"
#include "../abi/connect.h"
#include <endian.h>
#include <infiniband/stardv.h>
#include <stdlib.h>

enum { OP = 0x77, OTHER = 0x78, VALUES = 4000, ANSWER = 64, SWAPS = 50 };

struct file {
	void *bytes;
	size_t len;
};

struct filter {
	struct stardv_rpc_target target;
	uint64_t va;
	uint32_t key;
	uint32_t len;
	uint64_t least;
};

static struct {
	uint64_t values[VALUES];
	struct filter params;
	uint8_t answer[ANSWER] __attribute__((aligned(8)));
} memory;

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct ibv_qp *qps[2];

static struct file read_file(const char *name)
{
	struct file file = { 0 };
	FILE *from = fopen(name, "rb");

	if (!from || fseek(from, 0, SEEK_END) || !(file.len = (size_t)ftell(from)) ||
	    !(file.bytes = malloc(file.len)) || fseek(from, 0, SEEK_SET) ||
	    fread(file.bytes, 1, file.len, from) != file.len || fclose(from)) {
		perror(name);
		exit(2);
	}
	return file;
}

static int load(uint64_t op, const struct file *file, uint32_t flags)
{
	return stardv_load_module(pd, op, file->bytes, file->len, flags);
}

static void set_up(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1 };

	if (!list || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx)) ||
	    !(cq = ibv_create_cq(ctx, 64, NULL, NULL, 0)) ||
	    !(mr = ibv_reg_mr(pd, &memory, sizeof(memory), 7))) {
		perror("set up");
		exit(2);
	}
	ibv_free_device_list(list);
	attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
	attr.create_flags = STARDV_QP_CREATE_RPC;
	attr.cap.max_send_wr = attr.cap.max_recv_wr = 4;
	attr.cap.max_send_sge = attr.cap.max_recv_sge = 1;
	attr.pd = pd;
	attr.send_cq = attr.recv_cq = cq;
	for (int i = 0; i < 2; i++)
		CHECK(qps[i] = ibv_create_qp_ex(ctx, &attr));
	CHECK(!connect_rc(qps[0], qps[1]->qp_num) && !connect_rc(qps[1], qps[0]->qp_num));
}

static void tear_down(void)
{
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(qps[i]));
	CHECK(!ibv_dereg_mr(mr) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
}

/* An RPC with the parameters in memory: its record. */
static struct stardv_rpc_record call(uint64_t op, uint32_t len)
{
	struct ibv_sge sge = { (uintptr_t)&memory.params, (uint32_t)sizeof(memory.params.target) + len, mr->lkey };
	struct stardv_rpc_wr wr = { .op = op, .sg_list = &sge, .num_sge = 1 };
	const struct stardv_rpc_record *record;
	struct ibv_wc wc;

	memory.params.target = (struct stardv_rpc_target){ .addr = (uintptr_t)memory.answer, .rkey = mr->rkey,
							   .len = sizeof(memory.answer) };
	memset(memory.answer, 0, sizeof(memory.answer));
	CHECK(!stardv_post_rpc(qps[0], &wr, sizeof(wr)));
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS);
	while (!(record = stardv_rpc_answer(memory.answer, sizeof(memory.answer))))
		ibv_poll_cq(cq, 0, NULL);
	return *record;
}

/* How many values are at least so large: the kernel's answer, which must be right. */
static void filter(uint64_t op, uint64_t least)
{
	uint64_t want[2] = { 0, 0 }, got[2];
	struct stardv_rpc_record record;

	for (int i = 0; i < VALUES; i++) {
		if (memory.values[i] >= least) {
			want[0]++;
			want[1] += memory.values[i];
		}
	}
	memory.params = (struct filter){ .va = (uintptr_t)memory.values, .key = mr->rkey,
					 .len = sizeof(memory.values), .least = least };
	record = call(op, sizeof(memory.params) - sizeof(memory.params.target));
	CHECK(record.code == STARDV_RPC_OK && record.length == sizeof(got));
	memcpy(got, memory.answer + sizeof(memory.answer) - sizeof(record) - sizeof(got), sizeof(got));
	CHECK(got[0] == want[0] && got[1] == want[1]);
}

/* The same by a call of this process's own, without a queue pair. */
static void called(uint64_t op)
{
	struct filter all = { .va = (uintptr_t)memory.values, .key = mr->lkey, .len = sizeof(memory.values),
			      .least = 500 };
	const char *params = (const char *)&all + sizeof(all.target);
	size_t len = sizeof(all) - sizeof(all.target);
	struct stardv_rpc_record record;
	uint64_t got[2], want = 0;

	for (int i = 0; i < VALUES; i++)
		want += memory.values[i] >= 500;
	CHECK(!stardv_call_kernel(pd, op, params, len, got, sizeof(got), &record));
	CHECK(record.code == STARDV_RPC_OK && record.length == sizeof(got) && got[0] == want);
	CHECK(record.op == (uint32_t)op && record.magic == STARDV_RPC_MAGIC);
	CHECK(!stardv_call_kernel(pd, op, params, len, NULL, 0, &record));
	CHECK(record.code == STARDV_RPC_OVERFLOW && record.length == sizeof(got));
	CHECK(!stardv_call_kernel(pd, op, params, 3, NULL, 0, &record) && record.code == STARDV_RPC_BAD_PARAM);
	CHECK(!stardv_call_kernel(pd, ~op, NULL, 0, NULL, 0, &record) && record.code == STARDV_RPC_NO_KERNEL);
	all.key = ~mr->lkey;
	CHECK(!stardv_call_kernel(pd, op, params, len, got, sizeof(got), &record));
	CHECK(record.code == STARDV_RPC_ACCESS);
	CHECK(stardv_call_kernel(NULL, op, params, len, got, sizeof(got), &record) == EINVAL);
	CHECK(stardv_call_kernel(pd, op, NULL, len, got, sizeof(got), &record) == EINVAL);
	CHECK(stardv_call_kernel(pd, op, params, len, got, sizeof(got), NULL) == EINVAL);
	CHECK(stardv_call_kernel(pd, op, memory.values, 4097, got, sizeof(got), &record) == EINVAL);
}

/* What a program can do wrong. */
static void refusals(const struct file *module)
{
	struct file cut = { module->bytes, module->len - 1 };

	CHECK(stardv_load_module(NULL, OP, module->bytes, module->len, 0) == EINVAL);
	CHECK(stardv_load_module(pd, OP, NULL, 0, 0) == EINVAL);
	CHECK(load(OP, module, 2) == EINVAL);
	CHECK(load(OP, &cut, 0) == EINVAL);
	CHECK(stardv_load_module(pd, OP, "\0asm\1\0\0", 8, 0) == EINVAL);
	CHECK(stardv_unload_kernel(pd, OP) == EINVAL);
}

static void answers(const struct file *module)
{
	CHECK(!load(OP, module, 0) && load(OP, module, 0) == EBUSY);
	CHECK(stardv_load_kernel(pd, OP, STARDV_KERNEL_GET) == EBUSY && ibv_dealloc_pd(pd) == EBUSY);
	for (uint64_t least = 0; least < 1000; least += 97)
		filter(OP, least);
	called(OP);
	CHECK(call(OP, 4).code == STARDV_RPC_BAD_PARAM);
	memory.params = (struct filter){ .va = (uintptr_t)memory.values, .key = ~mr->rkey, .len = 64 };
	CHECK(call(OP, sizeof(memory.params) - sizeof(memory.params.target)).code == STARDV_RPC_ACCESS);
	CHECK(!stardv_unload_kernel(pd, OP) && call(OP, 4).code == STARDV_RPC_NO_KERNEL);
}

/* What nothing was loaded for is the program's: it takes the RPC from a receive, and answers by a WRITE. */
static void program(const struct file *module)
{
	static struct {
		struct stardv_rpc_target target;
		uint64_t number;
	} asked;
	static struct {
		uint64_t number;
		struct stardv_rpc_record record;
	} mine;
	struct ibv_mr *own[2] = { ibv_reg_mr(pd, &asked, sizeof(asked), IBV_ACCESS_LOCAL_WRITE),
				  ibv_reg_mr(pd, &mine, sizeof(mine), 0) };
	struct ibv_sge to = { (uintptr_t)&asked, sizeof(asked), own[0]->lkey }, from;
	struct ibv_recv_wr receive = { .wr_id = 9, .sg_list = &to, .num_sge = 1 }, *bad_recv;
	struct ibv_sge request = { (uintptr_t)&memory.params, sizeof(struct stardv_rpc_target) + 8, mr->lkey };
	struct stardv_rpc_wr rpc = { .op = OTHER, .sg_list = &request, .num_sge = 1 };
	struct ibv_send_wr answer = { .sg_list = &from, .num_sge = 1 }, *bad;
	const struct stardv_rpc_record *record;
	struct ibv_wc wc;
	int received = 0;

	CHECK(!load(OP, module, 0) && !stardv_load_kernel(pd, STARDV_RPC_ANY, STARDV_KERNEL_PROGRAM));
	CHECK(stardv_load_kernel(pd, STARDV_RPC_ANY, STARDV_KERNEL_GET) == EBUSY);
	filter(OP, 5);
	CHECK(!ibv_post_recv(qps[1], &receive, &bad_recv));
	memset(memory.answer, 0, sizeof(memory.answer));
	memory.params.target = (struct stardv_rpc_target){ .addr = (uintptr_t)memory.answer, .rkey = mr->rkey,
							   .len = sizeof(memory.answer) };
	memory.params.va = 41;
	CHECK(!stardv_post_rpc(qps[0], &rpc, sizeof(rpc)));
	for (int completions = 0; completions < 2;) {
		if (ibv_poll_cq(cq, 1, &wc) <= 0)
			continue;
		completions++;
		CHECK(wc.status == IBV_WC_SUCCESS);
		if (wc.wr_id == 9) {
			received = 1;
			CHECK(wc.opcode == IBV_WC_RECV && wc.wc_flags == IBV_WC_WITH_IMM &&
			      wc.imm_data == htobe32(OTHER) && wc.byte_len == sizeof(asked) && asked.number == 41);
		}
	}
	CHECK(received);
	mine.number = asked.number + 1;
	mine.record = (struct stardv_rpc_record){ OTHER, sizeof(mine.number), STARDV_RPC_OK, STARDV_RPC_MAGIC };
	from = (struct ibv_sge){ (uintptr_t)&mine, sizeof(mine), own[1]->lkey };
	stardv_rpc_reply(&answer, &asked.target, sizeof(mine.number));
	CHECK(!ibv_post_send(qps[1], &answer, &bad));
	while (!(record = stardv_rpc_answer(memory.answer, sizeof(memory.answer))))
		ibv_poll_cq(cq, 0, NULL);
	CHECK(record->code == STARDV_RPC_OK && record->op == OTHER && record->length == 8);
	CHECK(*(const uint64_t *)((const char *)record - 8) == 42);
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK(!stardv_unload_kernel(pd, STARDV_RPC_ANY) && !stardv_unload_kernel(pd, OP));
	CHECK(call(OTHER, 8).code == STARDV_RPC_NO_KERNEL);
	CHECK(!ibv_dereg_mr(own[0]) && !ibv_dereg_mr(own[1]));
}

/* What a kernel of this program's own sends by a queue pair stands before what the program posts then; for a
 * peer it sends nothing. */
static void sends(const struct file *sender)
{
	enum { TIMES = 40, WORD = 4711 };
	struct {
		uint32_t qpn;
		uint32_t key;
		uint64_t va;
		uint32_t times;
		uint32_t word;
	} params = { qps[0]->qp_num, mr->rkey, (uintptr_t)memory.values, TIMES, WORD };
	const uint32_t *words = (const uint32_t *)memory.values;
	struct ibv_send_wr last = { .opcode = IBV_WR_RDMA_WRITE }, *bad;
	struct stardv_rpc_record record;
	struct ibv_wc wc;

	CHECK(!load(OP, sender, 0));
	memset(memory.values, 0, sizeof(memory.values));
	CHECK(!stardv_call_kernel(pd, OP, &params, sizeof(params), NULL, 0, &record));
	CHECK(record.code == STARDV_RPC_OK);
	last.wr.rdma.remote_addr = (uintptr_t)memory.values;
	last.wr.rdma.rkey = mr->rkey;
	CHECK(!ibv_post_send(qps[0], &last, &bad));
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS);
	for (int i = 0; i < TIMES; i++)
		CHECK(words[i] == WORD);
	CHECK(!words[TIMES]);
	params.qpn = 0xffffff;
	CHECK(!stardv_call_kernel(pd, OP, &params, sizeof(params), NULL, 0, &record));
	CHECK(record.code == STARDV_RPC_ACCESS);
	params.qpn = qps[1]->qp_num;
	_Static_assert(sizeof(params) == sizeof(memory.params) - sizeof(memory.params.target), "they fit");
	memcpy((char *)&memory.params + sizeof(memory.params.target), &params, sizeof(params));
	CHECK(call(OP, sizeof(params)).code == STARDV_RPC_ACCESS);
	CHECK(!stardv_unload_kernel(pd, OP));
}

/* Others take its place between RPCs: no RPC finds none. */
static void swaps(const struct file *modules, int count)
{
	CHECK(!load(OP, &modules[0], STARDV_MODULE_REPLACE));
	for (int i = 0; i < SWAPS; i++) {
		CHECK(!load(OP, &modules[i % count], STARDV_MODULE_REPLACE));
		filter(OP, (uint64_t)i);
	}
	CHECK(!stardv_unload_kernel(pd, OP));
}

/* One that breaks a rule answers FAULT from then on; another one beside it, and one in its place, answer. */
static void survives(const struct file *hostile, const struct file *module)
{
	CHECK(!load(OTHER, module, 0));
	for (uint32_t how = 1; how <= 5; how++) {
		CHECK(!load(OP, hostile, STARDV_MODULE_REPLACE));
		memory.params = (struct filter){ .va = 0 };
		CHECK(call(OP, 8).code == STARDV_RPC_OK);
		memory.params.va = how | (uint64_t)mr->rkey << 32;
		CHECK(call(OP, 8).code == STARDV_RPC_FAULT);
		memory.params = (struct filter){ .va = 0 };
		CHECK(call(OP, 8).code == STARDV_RPC_FAULT);
		filter(OTHER, how);
		CHECK(!load(OP, module, STARDV_MODULE_REPLACE));
		filter(OP, how);
	}
	CHECK(!stardv_unload_kernel(pd, OTHER) && !stardv_unload_kernel(pd, OP));
}

/* Others change what answers, from outside: says what it sees. */
static void serve(void)
{
	uint32_t code = STARDV_RPC_NO_KERNEL, before;

	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	do {
		before = code;
		memory.params = (struct filter){ .va = (uintptr_t)memory.values, .key = mr->rkey, .len = 8 };
		code = call(OP, sizeof(memory.params) - sizeof(memory.params.target)).code;
		CHECK(code == STARDV_RPC_OK || code == STARDV_RPC_NO_KERNEL);
		if (code == STARDV_RPC_OK && before != code)
			puts("answers");
	} while (before == STARDV_RPC_NO_KERNEL || code == STARDV_RPC_OK);
	puts("no kernel");
}

int main(int argc, char **argv)
{
	struct file modules[8];
	int count = argc > 9 ? 8 : argc - 1;

	set_up();
	for (int i = 0; i < VALUES; i++)
		memory.values[i] = (uint64_t)i * 7919 % 1000;
	if (argc == 2 && !strcmp(argv[1], "serve")) {
		serve();
	} else if (argc == 2) {
		/* nothing runs modules here */
		CHECK(stardv_load_module(pd, OP, "\0asm\1\0\0", 8, 0) == EOPNOTSUPP);
	} else {
		for (int i = 0; i < count; i++)
			modules[i] = read_file(argv[i + 1]);
		refusals(&modules[2]);
		for (int i = 2; i < count; i++)
			answers(&modules[i]);
		swaps(modules + 2, count - 2);
		survives(&modules[0], &modules[2]);
		program(&modules[2]);
		sends(&modules[1]);
		for (int i = 0; i < count; i++)
			free(modules[i].bytes);
	}
	tear_down();
	return failures != 0;
}
