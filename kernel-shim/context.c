// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Contexts: what an open file has on the board, from its beginning to its end.
 *
 * A context ends when its file is closed, or when the board is reset, taken away or broken. In the
 * second case the file stays open, answers -ENODEV, and what it has mapped is a copy which no board sees.
 */
#include <linux/dma-mapping.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "starverbs.h"

irqreturn_t star_interrupt(int irq, void *data)
{
	struct star_vector *vector = data;
	struct star_context *context;

	spin_lock(&vector->lock);
	list_for_each_entry(context, &vector->contexts, vector_node)
		if (context->eventfd)
			star_eventfd_signal(context->eventfd);
	spin_unlock(&vector->lock);
	return IRQ_HANDLED;
}

/* The vector with the fewest contexts; under contexts_lock */
static struct star_vector *star_vector_get(struct star_board *board)
{
	struct star_vector *least = &board->vector[0];
	unsigned int i;

	for (i = 1; i < board->vectors; i++)
		if (board->vector[i].users < least->users)
			least = &board->vector[i];
	least->users++;
	return least;
}

/* Whether another context has this number: the board must not give it twice */
static bool star_number_is_taken(struct star_board *board, u32 number)
{
	struct star_context *other;

	list_for_each_entry(other, &board->contexts, node)
		if (!other->dead && other->number == number)
			return true;
	return false;
}

/* Opens the context on the board; under contexts_lock */
static int star_context_begin(struct star_context *context)
{
	struct star_board *board = context->board;
	u8 body[STAR_BODY_BYTES] __aligned(8) = {};
	struct starverbs_open_context *open = (void *)body;
	struct starverbs_number_reply *reply = (void *)body;
	u32 status;
	int err;

	open->events = context->events->dma;
	open->events_log = STAR_EVENTS_LOG;
	open->vector = context->vector - board->vector;
	err = star_command(board, 0, STARVERBS_OP_OPEN_CONTEXT, body, &status);
	if (err)
		return err;
	if (status)
		return status < MAX_ERRNO ? -(int)status : -EIO;
	context->number = reply->number;
	if (!context->number || context->number >= board->pages || context->number > U16_MAX ||
	    star_number_is_taken(board, context->number)) {
		star_board_fail(board, "a context with a number that it cannot have");
		return -EIO;
	}
	return 0;
}

static void star_context_free(struct star_context *context)
{
	star_buffers_free(context);
	if (context->eventfd)
		eventfd_ctx_put(context->eventfd);
	if (context->dummy)
		put_page(context->dummy);
	mmdrop(context->mm);
	kfree(context);
}

static struct star_context *star_context_alloc(struct star_board *board, struct address_space *mapping)
{
	struct star_context *context = kzalloc(sizeof(*context), GFP_KERNEL_ACCOUNT);

	if (!context)
		return NULL;
	context->board = board;
	context->mapping = mapping;
	context->mm = current->mm;
	mmgrab(context->mm);
	mutex_init(&context->lock);
	hash_init(context->regions);
	hash_init(context->queues);
	mutex_init(&context->map_lock);
	INIT_LIST_HEAD(&context->buffers);
	context->next_offset = board->page_bytes;
	return context;
}

/* A context for a file that is opened now */
struct star_context *star_context_open(struct star_board *board, struct address_space *mapping)
{
	struct star_context *context;
	int err;

	if (!current->mm)
		return ERR_PTR(-EINVAL);
	context = star_context_alloc(board, mapping);
	if (!context)
		return ERR_PTR(-ENOMEM);
	err = mutex_lock_killable(&board->contexts_lock);
	if (err)
		goto free;
	err = -ENODEV;
	if (READ_ONCE(board->state) != STAR_UP)
		goto unlock;
	context->events = star_buffer_new(context, sizeof(struct starverbs_event) << STAR_EVENTS_LOG);
	if (IS_ERR(context->events)) {
		err = PTR_ERR(context->events);
		goto unlock;
	}
	context->events->queues = 1;
	context->vector = star_vector_get(board);
	err = star_context_begin(context);
	if (err) {
		context->vector->users--;
		goto unlock;
	}
	list_add(&context->node, &board->contexts);
	spin_lock_irq(&context->vector->lock);
	list_add(&context->vector_node, &context->vector->contexts);
	spin_unlock_irq(&context->vector->lock);
	mutex_unlock(&board->contexts_lock);
	return context;
unlock:
	star_buffers_leave(context);
	mutex_unlock(&board->contexts_lock);
free:
	star_context_free(context);
	return ERR_PTR(err);
}

/* Gives back what the board was given. It does not reach that any more */
static void star_context_release_memory(struct star_context *context)
{
	struct star_region *region;
	struct hlist_node *next;
	int i;

	star_queues_free(context);
	hash_for_each_safe(context->regions, i, next, region, node) {
		hash_del(&region->node);
		star_region_free(context->board, region);
	}
	star_buffers_leave(context);
}

/*
 * Ends a context whose file is closed. Under contexts_lock for all of it: what is unmapped from DMA here must
 * be before the device goes.
 */
void star_context_close(struct star_context *context)
{
	struct star_board *board = context->board;
	u8 body[STAR_BODY_BYTES] __aligned(8) = {};
	struct starverbs_object *object = (void *)body;
	u32 status;

	mutex_lock(&board->contexts_lock);
	spin_lock_irq(&context->vector->lock);
	list_del(&context->vector_node);
	spin_unlock_irq(&context->vector->lock);
	context->vector->users--;
	if (!context->dead) {
		object->number = context->number;
		/* a board that does not answer has no DMA any more */
		if (!star_command(board, 0, STARVERBS_OP_CLOSE_CONTEXT, body, &status) && status)
			star_board_fail(board, "a context that does not close");
	}
	list_del(&context->node);
	star_context_release_memory(context);
	mutex_unlock(&board->contexts_lock);
	star_context_free(context);
}

/* Takes away what files have mapped. Those that are alive fault it in again */
static void star_contexts_zap(struct star_board *board)
{
	struct address_space *done = NULL;
	struct star_context *context;

	list_for_each_entry(context, &board->contexts, node) {
		if (context->mapping != done)
			unmap_mapping_range(context->mapping, 0, 0, 1);
		done = context->mapping;
	}
}

/* Ends all contexts of a board that has stopped; their files stay open */
void star_contexts_kill(struct star_board *board)
{
	struct star_context *context;

	mutex_lock(&board->contexts_lock);
	list_for_each_entry(context, &board->contexts, node) {
		mutex_lock(&context->map_lock);
		context->dead = true;
		mutex_unlock(&context->map_lock);
	}
	star_contexts_zap(board);
	list_for_each_entry(context, &board->contexts, node) {
		mutex_lock(&context->lock);
		star_context_release_memory(context);
		mutex_unlock(&context->lock);
		spin_lock_irq(&context->vector->lock);
		if (context->eventfd)
			star_eventfd_signal(context->eventfd);
		spin_unlock_irq(&context->vector->lock);
	}
	mutex_unlock(&board->contexts_lock);
}

/* What is signalled for its events from now on; fd -1: nothing */
int star_context_eventfd(struct star_context *context, int fd)
{
	struct eventfd_ctx *eventfd = NULL;

	if (fd != -1) {
		eventfd = eventfd_ctx_fdget(fd);
		if (IS_ERR(eventfd))
			return PTR_ERR(eventfd);
	}
	spin_lock_irq(&context->vector->lock);
	swap(context->eventfd, eventfd);
	/* events may have come before */
	if (context->eventfd)
		star_eventfd_signal(context->eventfd);
	spin_unlock_irq(&context->vector->lock);
	if (eventfd)
		eventfd_ctx_put(eventfd);
	return 0;
}
