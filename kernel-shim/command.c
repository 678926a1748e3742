// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Commands of a program: those that are known here are passed on, with every address in them translated.
 *
 * Addresses of queues come as offsets in the context's queue memory, those of regions as the program's own;
 * the board gets DMA addresses of memory that is this context's, and no answer tells a program of any. What
 * else a command names, the board looks up among the objects of the command's context.
 */
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "starverbs.h"

/* What has to be done with a command */
enum star_kind {
	STAR_PLAIN,
	STAR_REG,
	STAR_REREG,
	STAR_DEREG,
	STAR_QUERY_REGION,
	STAR_CREATE,
	STAR_RESIZE_CQ,
	STAR_DESTROY,
	STAR_MAD,
};

/* Kinds of objects that have queues, in their names here */
#define STAR_CQ STARVERBS_OP_CREATE_CQ
#define STAR_SRQ STARVERBS_OP_CREATE_SRQ
#define STAR_QP STARVERBS_OP_CREATE_QP

struct star_op {
	u16 op;
	u16 object;		/* what is made, changed or ends, if it has queues */
	u8 body;		/* bytes of the body */
	u8 reply;		/* bytes of the answer */
	enum star_kind kind;
};

#define SIZE(name) sizeof(struct starverbs_##name)

/* EOPNOTSUPP: what is not here */
static const struct star_op star_ops[] = {
	{ STARVERBS_OP_QUERY_DEVICE, 0, 0, SIZE(device_reply), STAR_PLAIN },
	{ STARVERBS_OP_QUERY_GID, 0, SIZE(object), SIZE(gid_reply), STAR_PLAIN },
	{ STARVERBS_OP_ALLOC_PD, 0, 0, SIZE(number_reply), STAR_PLAIN },
	{ STARVERBS_OP_DEALLOC_PD, 0, SIZE(object), 0, STAR_PLAIN },
	{ STARVERBS_OP_REG_MR, 0, SIZE(region), SIZE(number_reply), STAR_REG },
	{ STARVERBS_OP_REREG_MR, 0, SIZE(region), 0, STAR_REREG },
	{ STARVERBS_OP_DEREG_MR, 0, SIZE(object), 0, STAR_DEREG },
	{ STARVERBS_OP_QUERY_MR, 0, SIZE(object), SIZE(region), STAR_QUERY_REGION },
	{ STARVERBS_OP_ALLOC_NULL_MR, 0, SIZE(object), SIZE(number_reply), STAR_PLAIN },
	{ STARVERBS_OP_ALLOC_MW, 0, SIZE(window), SIZE(number_reply), STAR_PLAIN },
	{ STARVERBS_OP_DEALLOC_MW, 0, SIZE(object), 0, STAR_PLAIN },
	{ STARVERBS_OP_CREATE_AH, 0, SIZE(address_handle), SIZE(number_reply), STAR_PLAIN },
	{ STARVERBS_OP_DESTROY_AH, 0, SIZE(object), 0, STAR_PLAIN },
	{ STARVERBS_OP_CREATE_CQ, STAR_CQ, SIZE(create_cq), SIZE(number_reply), STAR_CREATE },
	{ STARVERBS_OP_DESTROY_CQ, STAR_CQ, SIZE(object), 0, STAR_DESTROY },
	{ STARVERBS_OP_RESIZE_CQ, STAR_CQ, SIZE(resize_cq), SIZE(number_reply), STAR_RESIZE_CQ },
	{ STARVERBS_OP_MODIFY_CQ, 0, SIZE(modify_cq), 0, STAR_PLAIN },
	{ STARVERBS_OP_CREATE_SRQ, STAR_SRQ, SIZE(create_srq), SIZE(number_reply), STAR_CREATE },
	{ STARVERBS_OP_CREATE_XRC_SRQ, STAR_SRQ, SIZE(create_xrc_srq), SIZE(number_reply), STAR_CREATE },
	{ STARVERBS_OP_MODIFY_SRQ, 0, SIZE(srq_limit), 0, STAR_PLAIN },
	{ STARVERBS_OP_QUERY_SRQ, 0, SIZE(object), SIZE(srq_limit), STAR_PLAIN },
	{ STARVERBS_OP_DESTROY_SRQ, STAR_SRQ, SIZE(object), 0, STAR_DESTROY },
	{ STARVERBS_OP_CREATE_QP, STAR_QP, SIZE(create_qp), SIZE(number_reply), STAR_CREATE },
	{ STARVERBS_OP_MODIFY_QP, 0, SIZE(modify_qp), 0, STAR_PLAIN },
	{ STARVERBS_OP_QUERY_QP, 0, SIZE(object), SIZE(modify_qp), STAR_PLAIN },
	{ STARVERBS_OP_DESTROY_QP, STAR_QP, SIZE(object), 0, STAR_DESTROY },
	{ STARVERBS_OP_LOAD_KERNEL, 0, SIZE(rpc_kernel), 0, STAR_PLAIN },
	{ STARVERBS_OP_UNLOAD_KERNEL, 0, SIZE(rpc_kernel), 0, STAR_PLAIN },
	{ STARVERBS_OP_ATTACH_GROUP, 0, SIZE(group), 0, STAR_PLAIN },
	{ STARVERBS_OP_DETACH_GROUP, 0, SIZE(group), 0, STAR_PLAIN },
	{ STARVERBS_OP_OPEN_MADS, 0, 0, SIZE(number_reply), STAR_PLAIN },
	{ STARVERBS_OP_SEND_MAD, 0, SIZE(mad), 0, STAR_MAD },
	{ STARVERBS_OP_RECEIVE_MAD, 0, SIZE(mad), SIZE(mad), STAR_MAD },
	{ STARVERBS_OP_CLAIM_SERVICE, 0, SIZE(service), 0, STAR_PLAIN },
	{ STARVERBS_OP_RELEASE_SERVICE, 0, SIZE(service), 0, STAR_PLAIN },
};

const u64 star_caps = STARVERBS_CAP_VERBS | STARVERBS_CAP_WINDOWS | STARVERBS_CAP_XRC |
		      STARVERBS_CAP_MULTICAST | STARVERBS_CAP_CQ_CHANGES | STARVERBS_CAP_NULL |
		      STARVERBS_CAP_MADS | STARVERBS_CAP_STROM;

/* What lets a peer or the board write into a region: enum ibv_access_flags */
#define STAR_ACCESS_WRITES (BIT(0) | BIT(1) | BIT(3) | BIT(4))

static const struct star_op *star_op_find(u16 op)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(star_ops); i++)
		if (star_ops[i].op == op)
			return &star_ops[i];
	return NULL;
}

static u64 star_queue_name(u16 kind, u32 number)
{
	return (u64)kind << 32 | number;
}

/* An object in the table. NULL: there is none */
static struct star_queue *star_queue_find(struct star_context *context, u64 name)
{
	struct star_queue *queue;

	hash_for_each_possible(context->queues, queue, node, name)
		if (queue->name == name)
			return queue;
	return NULL;
}

static void star_queue_free(struct star_context *context, struct star_queue *queue)
{
	mutex_lock(&context->map_lock);
	while (queue->count)
		queue->in[--queue->count]->queues--;
	mutex_unlock(&context->map_lock);
	kfree(queue);
}

void star_queues_free(struct star_context *context)
{
	struct star_queue *queue;
	struct hlist_node *next;
	int i;

	hash_for_each_safe(context->queues, i, next, queue, node) {
		hash_del(&queue->node);
		star_queue_free(context, queue);
	}
}

/*
 * Makes an offset in queue memory the DMA address of so many bytes there, which belong to the object from now
 * on. -EFAULT: there are not so many.
 */
static int star_translate(struct star_context *context, struct star_queue *queue, u64 *addr, u64 bytes)
{
	struct star_buffer *buffer;
	int err = -EFAULT;

	mutex_lock(&context->map_lock);
	buffer = star_buffer_find(context, *addr, bytes);
	if (buffer && buffer->cpu) {
		buffer->queues++;
		queue->in[queue->count++] = buffer;
		*addr = buffer->dma + (*addr - buffer->offset);
		err = 0;
	}
	mutex_unlock(&context->map_lock);
	return err;
}

/* The queues of a QP or an SRQ; one that has no slots has no address */
static int star_translate_queues(struct star_context *context, struct star_queue *queue,
				 struct starverbs_queues *queues)
{
	int err;

	if (queues->send_log > 31 || queues->recv_log > 31)
		return -EINVAL;
	err = star_translate(context, queue, &queues->program, sizeof(struct starverbs_program_index));
	if (!err)
		err = star_translate(context, queue, &queues->card, sizeof(struct starverbs_card_index));
	if (!queues->send_stride)
		queues->send = 0;
	else if (!err)
		err = star_translate(context, queue, &queues->send,
				     (u64)queues->send_stride << queues->send_log);
	if (!queues->recv_stride)
		queues->recv = 0;
	else if (!err)
		err = star_translate(context, queue, &queues->recv,
				     (u64)queues->recv_stride << queues->recv_log);
	return err;
}

/*
 * The same of a QP, with memory for answers if it speaks StRoM's dialect. A flag that is not known here may
 * name memory that would go untranslated.
 */
static int star_translate_qp(struct star_context *context, struct star_queue *queue,
			     struct starverbs_create_qp *qp)
{
	const u8 known = STARVERBS_QP_SIGNAL_ALL | STARVERBS_QP_BLOCK_LOOPBACK | STARVERBS_QP_RPC;
	int err;

	if (qp->flags & ~known)
		return -EOPNOTSUPP;
	err = star_translate_queues(context, queue, &qp->queues);
	if (!(qp->flags & STARVERBS_QP_RPC))
		qp->answers = 0;
	else if (!err)
		err = star_translate(context, queue, &qp->answers,
				     (u64)STARVERBS_ANSWER_BYTES * qp->answer_slots);
	return err;
}

static int star_translate_ring(struct star_context *context, struct star_queue *queue, u64 *entries,
			       u64 *taken, u32 log)
{
	u64 bytes = sizeof(struct starverbs_cqe);
	int err;

	if (log > 31)
		return -EINVAL;
	err = star_translate(context, queue, entries, bytes << log);
	return err ?: star_translate(context, queue, taken, sizeof(u32));
}

/* The addresses of a command that names queue memory, which is the queue's from now on */
static int star_translate_body(struct star_context *context, struct star_queue *queue, u16 op, void *body)
{
	struct starverbs_create_cq *cq = body;
	struct starverbs_resize_cq *resize = body;
	struct starverbs_mad *mad = body;

	BUILD_BUG_ON(offsetof(struct starverbs_create_srq, queues) ||
		     offsetof(struct starverbs_create_xrc_srq, queues));
	switch (op) {
	case STARVERBS_OP_CREATE_CQ:
		return star_translate_ring(context, queue, &cq->entries, &cq->taken, cq->log);
	case STARVERBS_OP_RESIZE_CQ:
		return star_translate_ring(context, queue, &resize->entries, &resize->taken, resize->log);
	case STARVERBS_OP_CREATE_QP:
		return star_translate_qp(context, queue, body);
	case STARVERBS_OP_SEND_MAD:
	case STARVERBS_OP_RECEIVE_MAD:
		return star_translate(context, queue, &mad->addr, STARVERBS_MAD_BYTES);
	default:
		return star_translate_queues(context, queue, body);
	}
}

/* Passes a command on as it is; under the context's lock, as all below */
static int star_pass(struct star_context *context, struct star_slot *command)
{
	return star_command(context->board, context->number, command->head.op, command->body,
			    &command->head.status);
}

static u32 star_first_word(struct star_slot *command)
{
	return ((struct starverbs_object *)command->body)->number;
}

/*
 * Passes on a command that names queue memory. The memory is in use when it was carried out, and NULL is what
 * it is in use for when it was not.
 */
static int star_pass_queue(struct star_context *context, struct star_slot *command, struct star_queue **made)
{
	struct star_queue *queue = kzalloc(sizeof(*queue), GFP_KERNEL_ACCOUNT);
	int err;

	*made = NULL;
	if (!queue)
		return -ENOMEM;
	err = star_translate_body(context, queue, command->head.op, command->body);
	if (err) {
		command->head.status = -err;
		err = 0;
	} else {
		err = star_pass(context, command);
	}
	if (err || command->head.status)
		star_queue_free(context, queue);
	else
		*made = queue;
	return err;
}

static void star_queue_add(struct star_context *context, struct star_queue *queue, u64 name)
{
	queue->name = name;
	hash_add(context->queues, &queue->node, name);
}

/* Makes an object with queues */
static int star_create(struct star_context *context, struct star_slot *command, u16 kind)
{
	struct star_queue *queue;
	int err = star_pass_queue(context, command, &queue);

	if (queue)
		star_queue_add(context, queue, star_queue_name(kind, star_first_word(command)));
	return err;
}

/* Has a completion queue lie elsewhere: where it lay is not in use any more */
static int star_resize_cq(struct star_context *context, struct star_slot *command)
{
	u64 name = star_queue_name(STAR_CQ, ((struct starverbs_resize_cq *)command->body)->cq);
	struct star_queue *queue, *old = star_queue_find(context, name);
	int err = star_pass_queue(context, command, &queue);

	if (!queue)
		return err;
	if (old) {
		hash_del(&old->node);
		star_queue_free(context, old);
	}
	star_queue_add(context, queue, name);
	return err;
}

/* A datagram: in queue memory, which stays while the board has it, and whose place no answer tells */
static int star_mad(struct star_context *context, struct star_slot *command)
{
	struct starverbs_mad *mad = (void *)command->body;
	u64 addr = mad->addr;
	struct star_queue *queue;
	int err = star_pass_queue(context, command, &queue);

	mad->addr = addr;
	if (queue)
		star_queue_free(context, queue);
	return err;
}

static int star_destroy(struct star_context *context, struct star_slot *command, u16 kind)
{
	struct star_queue *queue = star_queue_find(context, star_queue_name(kind, star_first_word(command)));
	int err = star_pass(context, command);

	if (!err && !command->head.status && queue) {
		hash_del(&queue->node);
		star_queue_free(context, queue);
	}
	return err;
}

static struct star_region *star_region_find(struct star_context *context, u32 key)
{
	struct star_region *region;

	hash_for_each_possible(context->regions, region, node, key)
		if (region->key == key)
			return region;
	return NULL;
}

/* Says to the board where a region lies */
static int star_region_describe(struct star_context *context, struct star_region *region,
				struct starverbs_region *body)
{
	int err = star_region_map(context->board, region);

	if (err)
		return err;
	body->addr = region->dma;
	body->pieces = region->pieces;
	body->page_log = region->page_log;
	body->offset = region->offset;
	return 0;
}

/* Makes a region, or has one of this context lie elsewhere. Takes the region that was pinned for it */
static int star_register(struct star_context *context, struct star_slot *command, struct star_region *region)
{
	bool is_new = command->head.op == STARVERBS_OP_REG_MR;
	struct star_region *old = NULL;
	int err;

	if (!is_new)
		old = star_region_find(context, star_first_word(command));
	err = is_new || old ? star_region_describe(context, region, (void *)command->body) : -EINVAL;
	if (err) {
		command->head.status = -err;
		err = 0;
	} else {
		err = star_pass(context, command);
	}
	if (err || command->head.status) {
		star_region_free(context->board, region);
		return err;
	}
	region->key = old ? old->key : star_first_word(command);
	hash_add(context->regions, &region->node, region->key);
	if (old) {
		hash_del(&old->node);
		star_region_free(context->board, old);
	}
	return 0;
}

static int star_deregister(struct star_context *context, struct star_slot *command)
{
	struct star_region *region = star_region_find(context, star_first_word(command));
	int err = star_pass(context, command);

	if (!err && !command->head.status && region) {
		hash_del(&region->node);
		star_region_free(context->board, region);
	}
	return err;
}

static int star_query_region(struct star_context *context, struct star_slot *command)
{
	struct star_region *region = star_region_find(context, star_first_word(command));
	struct starverbs_region *body = (void *)command->body;
	int err;

	if (!region) {
		command->head.status = EINVAL;
		return 0;
	}
	err = star_pass(context, command);
	body->addr = region->addr;
	body->pieces = 0;
	body->page_log = 0;
	body->offset = 0;
	return err;
}

static int star_dispatch(struct star_context *context, const struct star_op *op, struct star_slot *command,
			 struct star_region *region)
{
	switch (op->kind) {
	case STAR_PLAIN:
		return star_pass(context, command);
	case STAR_REG:
	case STAR_REREG:
		return star_register(context, command, region);
	case STAR_DEREG:
		return star_deregister(context, command);
	case STAR_QUERY_REGION:
		return star_query_region(context, command);
	case STAR_CREATE:
		return star_create(context, command, op->object);
	case STAR_RESIZE_CQ:
		return star_resize_cq(context, command);
	case STAR_MAD:
		return star_mad(context, command);
	case STAR_DESTROY:
		return star_destroy(context, command, op->object);
	}
	return -EINVAL;
}

/* The memory of a command that makes a region; NULL: it is another command */
static struct star_region *star_pin_for(const struct star_op *op, struct star_slot *command)
{
	struct starverbs_region *body = (void *)command->body;

	if (op->kind != STAR_REG && op->kind != STAR_REREG)
		return NULL;
	/* a table is this module's affair */
	if (body->pieces || body->page_log || body->offset)
		return ERR_PTR(-EINVAL);
	return star_region_pin(body->addr, body->length, body->access & STAR_ACCESS_WRITES);
}

/*
 * Carries out a program's command. What the board, or this, says against it is in its status; an error is
 * returned where there is no board, or no memory for this.
 */
int star_context_command(struct star_context *context, struct star_slot *command)
{
	const struct star_op *op = star_op_find(command->head.op);
	struct star_region *region;
	int err;

	if (!op) {
		command->head.status = EOPNOTSUPP;
		return 0;
	}
	memset(command->body + op->body, 0, sizeof(command->body) - op->body);
	region = star_pin_for(op, command);
	if (IS_ERR(region)) {
		if (PTR_ERR(region) == -EINTR)
			return -EINTR;
		command->head.status = -PTR_ERR(region);
		return 0;
	}
	mutex_lock(&context->lock);
	if (context->dead) {
		err = -ENODEV;
		if (region)
			star_region_free(context->board, region);
	} else {
		err = star_dispatch(context, op, command, region);
	}
	mutex_unlock(&context->lock);
	/* what else lies there is no part of the answer */
	if (!err && !command->head.status)
		memset(command->body + op->reply, 0, sizeof(command->body) - op->reply);
	return err;
}
