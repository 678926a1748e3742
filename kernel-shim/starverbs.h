/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * What the files of this module share: a board, its contexts, their memory.
 *
 * Locks, in the order in which they are taken:
 *   star_board.contexts_lock	list of contexts; held while one is opened, closed or killed
 *   star_context.lock		commands of a context, its regions and queues
 *   star_board.command_lock	the command queue, star_board.state
 *   mmap_lock			taken under none of those above
 *   star_context.map_lock	queue memory, star_context.dead; also under mmap_lock
 *   star_vector.lock		eventfds of a vector's contexts; in interrupts
 */
#ifndef STARVERBS_INTERNAL_H
#define STARVERBS_INTERNAL_H

#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/eventfd.h>
#include <linux/fs.h>
#include <linux/hashtable.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/spinlock.h>
#include <linux/version.h>
#include <linux/workqueue.h>

#include <starverbs/regs.h>
#include <starverbs/uapi.h>
#include <starverbs/chardev.h>
#include <starverbs/queues.h>

#include "compat.h"

#if !defined(CONFIG_64BIT) || defined(__BIG_ENDIAN)
#error "registers of 64 bits are written as wholes, and all numbers are little-endian"
#endif

/* Interrupt vectors used at most */
#define STAR_VECTORS 32
/* log2 of the entries of a context's event queue */
#define STAR_EVENTS_LOG 12
/* Bytes of a command behind its head */
#define STAR_BODY_BYTES (STARVERBS_COMMAND_BYTES - sizeof(struct starverbs_command_head))

/* A command as it lies in the queue */
struct star_slot {
	struct starverbs_command_head head;
	u8 body[STAR_BODY_BYTES];
};

/* A vector, and the contexts whose events it announces */
struct star_vector {
	spinlock_t lock;		/* of the list, and of its contexts' eventfds */
	struct list_head contexts;
	unsigned int users;		/* under contexts_lock */
};

enum star_state {
	STAR_UP,		/* takes commands */
	STAR_DOWN,		/* is being reset */
	STAR_BROKEN,		/* did not answer: a reset brings it back */
	STAR_GONE,		/* the driver was unbound */
};

/* A function of a board. Lives as long as its device and every open file */
struct star_board {
	struct device dev;
	struct cdev cdev;
	struct pci_dev *pdev;
	int id;

	void __iomem *regs;
	phys_addr_t doorbells;
	u64 caps;
	u32 version;
	u32 cells;
	size_t page_bytes;		/* of a doorbell page */
	u32 pages;			/* doorbell pages, of which context 0 has the first */

	struct mutex contexts_lock;	/* list of contexts, and who comes and goes */
	struct list_head contexts;
	unsigned int vectors;
	struct star_vector vector[STAR_VECTORS];

	struct mutex command_lock;	/* the command queue, and state */
	enum star_state state;
	u32 tail;
	struct star_slot *slot;		/* the queue: one command */
	dma_addr_t slot_dma;
	void *events;			/* of context 0, which has none */
	dma_addr_t events_dma;
	void *qpc;			/* memory for QP contexts; NULL: the board has its own */
	dma_addr_t qpc_dma;
	size_t qpc_bytes;
	struct work_struct broken;
};

/* A piece of queue memory. All under map_lock, but queues: under the context's lock as well */
struct star_buffer {
	struct list_head node;
	u64 offset;			/* in the file */
	size_t bytes;
	void *cpu;			/* NULL: the board is gone, and so is the memory */
	dma_addr_t dma;
	struct page **pages;		/* and behind them their copies, when the board is gone */
	unsigned int maps;		/* VMAs */
	unsigned int queues;		/* objects with a queue here */
	bool ended;			/* goes with its last VMA */
};

/* Queues of an object, and in which pieces they lie */
struct star_queue {
	struct hlist_node node;
	u64 name;			/* kind and number */
	unsigned int count;
	struct star_buffer *in[5];
};

/* A region: pinned pages of a program, as the board knows them */
struct star_region {
	struct hlist_node node;
	u32 key;
	struct mm_struct *mm;
	u64 addr;			/* in the program */
	u64 length;
	unsigned long pages;		/* pinned and accounted */
	bool writable;
	bool is_mapped;
	struct sg_append_table sg;
	__le64 *table;			/* translation table; NULL: it is one piece */
	size_t table_bytes;
	dma_addr_t dma;			/* of the table, or of the first byte */
	u32 pieces;
	u32 page_log;
	u32 offset;
};

/* An open file */
struct star_context {
	struct star_board *board;
	struct list_head node;
	struct address_space *mapping;
	struct mm_struct *mm;		/* of who opened it */
	u32 number;

	struct star_vector *vector;
	struct list_head vector_node;
	struct eventfd_ctx *eventfd;

	struct mutex lock;		/* one command at a time */
	DECLARE_HASHTABLE(regions, 7);
	DECLARE_HASHTABLE(queues, 7);

	struct mutex map_lock;		/* queue memory, and dead */
	bool dead;			/* ended with the board, or its reset */
	struct list_head buffers;
	unsigned int buffer_count;
	u64 next_offset;
	struct star_buffer *events;
	struct page *dummy;		/* the doorbell page when the board is gone */
};

/* board.c */
int star_board_map(struct star_board *board);
int star_board_enable(struct star_board *board);
void star_board_stop(struct star_board *board, enum star_state state);
void star_board_fail(struct star_board *board, const char *why);
void star_board_unmap(struct star_board *board);
int star_command(struct star_board *board, u32 context, u16 op, void *body, u32 *status);

/* context.c */
struct star_context *star_context_open(struct star_board *board, struct address_space *mapping);
void star_context_close(struct star_context *context);
void star_contexts_kill(struct star_board *board);
int star_context_eventfd(struct star_context *context, int fd);
irqreturn_t star_interrupt(int irq, void *data);

/* file.c */
extern const struct file_operations star_file_operations;

/* sysfs.c */
extern const struct attribute_group *star_board_groups[];

/* mapping.c */
int star_mmap(struct file *file, struct vm_area_struct *vma);

/* buffer.c */
int star_account(struct mm_struct *mm, unsigned long pages);
void star_unaccount(struct mm_struct *mm, unsigned long pages);
struct star_buffer *star_buffer_new(struct star_context *context, size_t bytes);
int star_buffer_end(struct star_context *context, u64 offset);
struct star_buffer *star_buffer_find(struct star_context *context, u64 offset, u64 bytes);
void star_buffer_put(struct star_context *context, struct star_buffer *buffer);
struct page *star_buffer_page(struct star_buffer *buffer, size_t index, bool is_dead);
void star_buffers_leave(struct star_context *context);
void star_buffers_free(struct star_context *context);

/* command.c */
extern const u64 star_caps;	/* what is passed on of what a board takes */
int star_context_command(struct star_context *context, struct star_slot *command);
void star_queues_free(struct star_context *context);

/* region.c */
struct star_region *star_region_pin(u64 addr, u64 length, bool writable);
int star_region_map(struct star_board *board, struct star_region *region);
void star_region_free(struct star_board *board, struct star_region *region);

#endif
