// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Queue memory: pieces of coherent memory, each contiguous for the board, which a context's process maps.
 *
 * A piece is accounted to its process like memory that it locks. It ends when it was given back and
 * nobody has it mapped; its memory ends at the latest with the context or the board. If it is the board, its
 * process goes on with a copy: that has what was posted, so that the process can tell what was not done.
 */
#include <linux/dma-mapping.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "starverbs.h"

/* Pieces of a context at most */
#define STAR_BUFFERS 1024

/* Accounts pages that stay in memory to a process. -ENOMEM: beyond its RLIMIT_MEMLOCK */
int star_account(struct mm_struct *mm, unsigned long pages)
{
	unsigned long limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;

	if (atomic64_add_return(pages, &mm->pinned_vm) > limit && !capable(CAP_IPC_LOCK)) {
		atomic64_sub(pages, &mm->pinned_vm);
		return -ENOMEM;
	}
	return 0;
}

void star_unaccount(struct mm_struct *mm, unsigned long pages)
{
	atomic64_sub(pages, &mm->pinned_vm);
}

static size_t star_buffer_count(struct star_buffer *buffer)
{
	return buffer->bytes >> PAGE_SHIFT;
}

/* Gives back the memory of a piece, which nobody has mapped; under map_lock */
static void star_buffer_release_memory(struct star_context *context, struct star_buffer *buffer)
{
	if (!buffer->cpu)
		return;
	dma_free_coherent(&context->board->pdev->dev, buffer->bytes, buffer->cpu, buffer->dma);
	buffer->cpu = NULL;
}

static void star_buffer_free(struct star_context *context, struct star_buffer *buffer)
{
	size_t count = star_buffer_count(buffer), i;

	star_buffer_release_memory(context, buffer);
	star_unaccount(context->mm, count);
	for (i = count; i < 2 * count; i++)
		if (buffer->pages[i])
			__free_page(buffer->pages[i]);
	list_del(&buffer->node);
	context->buffer_count--;
	kvfree(buffer->pages);
	kfree(buffer);
}

/*
 * A page of a piece; of one whose board is gone its copy, or zeros where no memory was left for one. NULL:
 * there is none for zeros either. Under map_lock.
 */
struct page *star_buffer_page(struct star_buffer *buffer, size_t index, bool is_dead)
{
	struct page **copy = &buffer->pages[star_buffer_count(buffer) + index];

	if (!is_dead)
		return buffer->pages[index];
	if (!*copy) {
		*copy = alloc_page(GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN);
		if (*copy && buffer->cpu)
			memcpy(page_address(*copy), buffer->cpu + (index << PAGE_SHIFT), PAGE_SIZE);
	}
	return *copy;
}

/* The pages of coherent memory, which may lie anywhere */
static int star_buffer_list_pages(struct star_context *context, struct star_buffer *buffer)
{
	size_t count = star_buffer_count(buffer);
	struct sg_page_iter iter;
	struct sg_table table;
	size_t i = 0;
	int err;

	buffer->pages = kvcalloc(2 * count, sizeof(*buffer->pages), GFP_KERNEL_ACCOUNT);
	if (!buffer->pages)
		return -ENOMEM;
	err = dma_get_sgtable(&context->board->pdev->dev, &table, buffer->cpu, buffer->dma, buffer->bytes);
	if (err)
		return err;
	for_each_sgtable_page(&table, &iter, 0) {
		if (i == count)
			break;
		buffer->pages[i++] = sg_page_iter_page(&iter);
	}
	sg_free_table(&table);
	return i == count ? 0 : -EIO;
}

/* A new piece of zeroed memory */
struct star_buffer *star_buffer_new(struct star_context *context, size_t bytes)
{
	struct star_buffer *buffer;
	int err;

	if (!bytes || bytes > SZ_1G)
		return ERR_PTR(-EINVAL);
	bytes = PAGE_ALIGN(bytes);
	buffer = kzalloc(sizeof(*buffer), GFP_KERNEL_ACCOUNT);
	if (!buffer)
		return ERR_PTR(-ENOMEM);
	buffer->bytes = bytes;
	err = star_account(context->mm, bytes >> PAGE_SHIFT);
	if (err)
		goto free;
	err = -ENOMEM;
	buffer->cpu = dma_alloc_coherent(&context->board->pdev->dev, bytes, &buffer->dma,
					 GFP_KERNEL | __GFP_NOWARN);
	if (!buffer->cpu)
		goto unaccount;
	err = star_buffer_list_pages(context, buffer);
	if (err)
		goto release;
	mutex_lock(&context->map_lock);
	err = context->dead ? -ENODEV : context->buffer_count == STAR_BUFFERS ? -ENOSPC : 0;
	if (!err) {
		buffer->offset = context->next_offset;
		context->next_offset += bytes;
		list_add(&buffer->node, &context->buffers);
		context->buffer_count++;
	}
	mutex_unlock(&context->map_lock);
	if (!err)
		return buffer;
release:
	star_buffer_release_memory(context, buffer);
unaccount:
	star_unaccount(context->mm, bytes >> PAGE_SHIFT);
free:
	kvfree(buffer->pages);
	kfree(buffer);
	return ERR_PTR(err);
}

/* The piece in which so many bytes lie; under map_lock */
struct star_buffer *star_buffer_find(struct star_context *context, u64 offset, u64 bytes)
{
	struct star_buffer *buffer;

	list_for_each_entry(buffer, &context->buffers, node) {
		u64 from = offset - buffer->offset;

		if (offset >= buffer->offset && from < buffer->bytes && bytes <= buffer->bytes - from)
			return buffer->ended ? NULL : buffer;
	}
	return NULL;
}

/* Its process gives a piece back. -EBUSY: a queue lies there */
int star_buffer_end(struct star_context *context, u64 offset)
{
	struct star_buffer *buffer;
	int err = 0;

	mutex_lock(&context->map_lock);
	buffer = star_buffer_find(context, offset, 1);
	if (!buffer || buffer->offset != offset) {
		err = -EINVAL;
	} else if (buffer->queues) {
		err = -EBUSY;
	} else {
		buffer->ended = true;
		if (!buffer->maps)
			star_buffer_free(context, buffer);
	}
	mutex_unlock(&context->map_lock);
	return err;
}

/* A VMA of it ends; under map_lock */
void star_buffer_put(struct star_context *context, struct star_buffer *buffer)
{
	if (!--buffer->maps && buffer->ended)
		star_buffer_free(context, buffer);
}

/*
 * The board reaches no piece any more, and no process has one mapped: the memory goes back, and what maps a
 * piece gets its copy.
 */
void star_buffers_leave(struct star_context *context)
{
	struct star_buffer *buffer;
	size_t i;

	mutex_lock(&context->map_lock);
	list_for_each_entry(buffer, &context->buffers, node) {
		for (i = 0; buffer->cpu && buffer->maps && i < star_buffer_count(buffer); i++)
			star_buffer_page(buffer, i, true);
		star_buffer_release_memory(context, buffer);
	}
	mutex_unlock(&context->map_lock);
}

/* The last use of the context */
void star_buffers_free(struct star_context *context)
{
	struct star_buffer *buffer, *next;

	list_for_each_entry_safe(buffer, next, &context->buffers, node)
		star_buffer_free(context, buffer);
}
