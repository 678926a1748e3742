/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A kernel of StRoM as a WebAssembly module, in C. It has two functions,
 *
 *	STARVERBS_KERNEL(start) { ... }	a request begins, or a stream goes on
 *	STARVERBS_KERNEL(step) { ... }	the commands of the call before were executed
 *
 * which return STARVERBS_GO_ON, or the code of the answer. One of them looks at starverbs_mailbox: it has
 * the parameters, what the last read brought, and eight registers that are the request's own. All else in the
 * module's memory is shared by all requests. docs/strom.md has the rules; starverbs-kernel(1) builds it:
 *
 *	starverbs kernel build filter.c
 *
 * provider/kernels/src/mailbox.rs has the same in Rust, whose tests compare the two.
 */
#ifndef STARVERBS_KERNEL_H
#define STARVERBS_KERNEL_H

#include <stddef.h>
#include <stdint.h>

enum starverbs_code {
	/* Not done: executes the commands, then calls step */
	STARVERBS_GO_ON = -1,
	STARVERBS_OK = 0,
	STARVERBS_BAD_PARAM = 2,
	STARVERBS_NOT_FOUND = 3,
	STARVERBS_RETRIES = 4,
	STARVERBS_ACCESS = 5,
	STARVERBS_OVERFLOW = 6,
};

/* starverbs_mailbox.input */
enum starverbs_input {
	/* RPC: bytes are its parameters */
	STARVERBS_PARAMS = 0,
	/* RPC WRITE: bytes are a packet's payload; */
	STARVERBS_DATA = 1,
	/* it begins a message; */
	STARVERBS_FIRST = 2,
	/* it ends one */
	STARVERBS_LAST = 4,
};

enum {
	STARVERBS_COMMANDS = 64,
	/* Most bytes of a packet, and of a read */
	STARVERBS_PIECE = 4096,
	STARVERBS_COMMAND_READ = 1,
	STARVERBS_COMMAND_WRITE = 2,
	STARVERBS_COMMAND_SEND = 3,
	STARVERBS_REPLY_BYTES = 1,
	STARVERBS_REPLY_REGION = 2,
};

struct starverbs_command {
	/* STARVERBS_COMMAND_*; of a send the queue pair above the lower 8 bits */
	uint32_t kind;
	uint32_t key;
	uint64_t va;
	uint32_t len;
	/* Write, send: where the bytes lie in the module's memory */
	uint32_t at;
};

struct starverbs_mailbox {
	/* 0 at the start of a message, and kept between the packets of one */
	uint64_t regs[8];
	/* By the card: the queue pair, enum starverbs_input, bytes in `bytes` and in `read` */
	uint32_t qpn;
	uint32_t input;
	uint32_t bytes_len;
	uint32_t read_len;
	/* By the kernel, and 0 before each call: commands, and what is added to the answer */
	uint32_t commands;
	uint32_t reply;
	uint32_t reply_at;
	uint32_t reply_len;
	uint32_t reply_key;
	uint32_t reserved;
	uint64_t reply_va;
	struct starverbs_command queue[STARVERBS_COMMANDS];
	/* By the card: the parameters, or a packet's payload; what the last read brought */
	uint8_t bytes[STARVERBS_PIECE];
	uint8_t read[STARVERBS_PIECE];
};

#ifdef __wasm__

static struct starverbs_mailbox starverbs_mailbox;

__attribute__((export_name("starverbs_mailbox_v1"))) uint32_t starverbs_mailbox_v1(void);
uint32_t starverbs_mailbox_v1(void)
{
	return (uint32_t)(uintptr_t)&starverbs_mailbox;
}

/* Defines start or step. */
#define STARVERBS_KERNEL(method)                                                                    \
	__attribute__((export_name("starverbs_" #method))) int starverbs_##method(void);            \
	int starverbs_##method(void)

/* The next place in the queue, or NULL: it is full; return STARVERBS_GO_ON and try again. */
static inline struct starverbs_command *starverbs_queue(uint32_t kind, uint32_t key, uint64_t va,
							uint32_t len)
{
	struct starverbs_command *command;

	if (starverbs_mailbox.commands >= STARVERBS_COMMANDS)
		return NULL;
	command = &starverbs_mailbox.queue[starverbs_mailbox.commands++];
	*command = (struct starverbs_command){ kind, key, va, len, 0 };
	return command;
}

/* Reads `len` bytes, STARVERBS_PIECE at most: they are in starverbs_mailbox.read at the next step. 0: there
 * is no room. */
static inline int starverbs_read(uint32_t key, uint64_t va, uint32_t len)
{
	return starverbs_queue(STARVERBS_COMMAND_READ, key, va, len) != NULL;
}

/* Writes bytes that stay as they are until this call returns to the card: 8192 at most in all. 0: no room. */
static inline int starverbs_write(uint32_t key, uint64_t va, const void *data, uint32_t len)
{
	struct starverbs_command *command = starverbs_queue(STARVERBS_COMMAND_WRITE, key, va, len);

	if (command)
		command->at = (uint32_t)(uintptr_t)data;
	return command != NULL;
}

/* Has a queue pair of the kernel's domain send bytes as a WRITE to a region of its peer, 4096 at most, as of
 * starverbs_write. Of a kernel that its own program called (stardv_call_kernel) alone: others end with
 * STARVERBS_ACCESS. 0: no room. */
static inline int starverbs_send(uint32_t qpn, uint32_t rkey, uint64_t va, const void *data, uint32_t len)
{
	return starverbs_write(rkey, va, data, len) &&
	       (starverbs_mailbox.queue[starverbs_mailbox.commands - 1].kind = STARVERBS_COMMAND_SEND | qpn << 8);
}

/* Adds bytes to the answer, once a call: 4096 at most in all. */
static inline void starverbs_reply(const void *data, uint32_t len)
{
	starverbs_mailbox.reply = STARVERBS_REPLY_BYTES;
	starverbs_mailbox.reply_at = (uint32_t)(uintptr_t)data;
	starverbs_mailbox.reply_len = len;
}

/* The answer is bytes of a region, as they are when they leave. */
static inline void starverbs_reply_from(uint32_t key, uint64_t va, uint32_t len)
{
	starverbs_mailbox.reply = STARVERBS_REPLY_REGION;
	starverbs_mailbox.reply_key = key;
	starverbs_mailbox.reply_va = va;
	starverbs_mailbox.reply_len = len;
}

#endif /* __wasm__ */

#endif /* STARVERBS_KERNEL_H */
