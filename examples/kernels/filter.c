/*
 * A kernel of StRoM: counts and adds up the values of a column that are at least so large, where the column
 * lies. filter/src/lib.rs is the same in Rust.
 *
 *	starverbs kernel build filter.c
 */
#include <starverbs/kernel.h>

struct params {
	uint64_t va;
	uint32_t key;
	/* Bytes of the column, whose values have 8 */
	uint32_t len;
	uint64_t least;
};

struct answer {
	uint64_t count;
	uint64_t sum;
};

/* The request's registers: bytes that were asked for, and the answer so far. */
enum { AT, COUNT, SUM };

static struct answer answer;

static const struct params *params(void)
{
	const struct params *params = (const void *)starverbs_mailbox.bytes;

	return starverbs_mailbox.bytes_len == sizeof(*params) && params->len % 8 == 0 ? params : NULL;
}

/* Asks for the next piece. 0: there is none. */
static int fetch(const struct params *params)
{
	uint64_t *regs = starverbs_mailbox.regs, at = regs[AT];
	uint32_t left = params->len - (uint32_t)at;
	uint32_t len = left < STARVERBS_PIECE ? left : STARVERBS_PIECE;

	regs[AT] += len;
	return len > 0 && starverbs_read(params->key, params->va + at, len);
}

STARVERBS_KERNEL(start)
{
	if (starverbs_mailbox.input != STARVERBS_PARAMS || !params())
		return STARVERBS_BAD_PARAM;
	fetch(params());
	return STARVERBS_GO_ON;
}

STARVERBS_KERNEL(step)
{
	const uint64_t *values = (const void *)starverbs_mailbox.read;
	uint64_t *regs = starverbs_mailbox.regs;
	const struct params *asked = params();

	for (uint32_t i = 0; i < starverbs_mailbox.read_len / 8; i++) {
		if (values[i] >= asked->least) {
			regs[COUNT]++;
			regs[SUM] += values[i];
		}
	}
	if (fetch(asked))
		return STARVERBS_GO_ON;
	answer = (struct answer){ regs[COUNT], regs[SUM] };
	starverbs_reply(&answer, sizeof(answer));
	return STARVERBS_OK;
}
