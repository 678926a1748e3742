/* SPDX-License-Identifier: ((GPL-2.0 WITH Linux-syscall-note) OR MIT) */
/*
 * The character device of a board, /dev/starN (kernel-shim), as provider/queues has it in Rust
 * (provider/queues/tests/board.rs compiles this file against it). docs/board.md has the rules.
 *
 * An open file is a context of the board. The file's offsets are its address space: at 0 lies its doorbell
 * page, behind it queue memory. Both are mapped with mmap(MAP_SHARED). Addresses of queues in commands are
 * such offsets; the address of a region is the program's own.
 */
#ifndef STARVERBS_CHARDEV_H
#define STARVERBS_CHARDEV_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Type of the requests */
#define STARVERBS_IOC_TYPE 0xbd

/* What the context is */
struct starverbs_info {
	__u64 caps;	/* STARVERBS_CAP_* of the board, as far as the kernel passes it on */
	__u64 events;	/* Where its event queue lies */
	__u32 events_log;	/* log2 of the entries of the event queue */
	__u32 version;	/* STARVERBS_VERSION of the board */
	__u32 cells;	/* Cells of its doorbell page */
	__u32 reserved;
};

/* A command: struct starverbs_command_head, then its body, over which the answer is written */
struct starverbs_command {
	__u64 words[16];	/* STARVERBS_COMMAND_BYTES */
};

/* A piece of queue memory */
struct starverbs_queue_memory {
	__u64 bytes;	/* Its size: whole pages, rounded up */
	__u64 offset;	/* Where it begins */
};

/* What is signalled when events were written */
struct starverbs_eventfd {
	__s32 fd;	/* An eventfd; -1: nothing any more */
	__u32 reserved;
};

/* ENODEV: the board is gone, or was reset since the file was opened. So for all of these */
#define STARVERBS_IOC_INFO _IOR(STARVERBS_IOC_TYPE, 0, struct starverbs_info)
/* Carries out a command; the board's errno is in its status. EACCES: the file is another process's */
#define STARVERBS_IOC_COMMAND _IOWR(STARVERBS_IOC_TYPE, 1, struct starverbs_command)
/* Makes zeroed memory for queues; answers its offset. ENOMEM: beyond RLIMIT_MEMLOCK, or not in one piece */
#define STARVERBS_IOC_QUEUE_MEMORY _IOWR(STARVERBS_IOC_TYPE, 2, struct starverbs_queue_memory)
/* Ends a piece, named by its offset. EBUSY: a queue lies there */
#define STARVERBS_IOC_FREE_QUEUE_MEMORY _IOW(STARVERBS_IOC_TYPE, 3, struct starverbs_queue_memory)
/* Sets what is signalled */
#define STARVERBS_IOC_EVENTFD _IOW(STARVERBS_IOC_TYPE, 4, struct starverbs_eventfd)

#if defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
_Static_assert(sizeof(struct starverbs_info) == 32, "starverbs_info");
_Static_assert(sizeof(struct starverbs_command) == 128, "starverbs_command");
_Static_assert(sizeof(struct starverbs_queue_memory) == 16, "starverbs_queue_memory");
_Static_assert(sizeof(struct starverbs_eventfd) == 8, "starverbs_eventfd");
#endif

#endif
