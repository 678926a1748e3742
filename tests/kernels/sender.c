/*
 * A send kernel: sends a word by a queue pair, a number of times, to places that follow each other at its
 * peer.
 */
#include <starverbs/kernel.h>

struct params {
	uint32_t qpn;
	uint32_t key;
	uint64_t va;
	uint32_t times;
	uint32_t word;
};

STARVERBS_KERNEL(start)
{
	return starverbs_mailbox.bytes_len == sizeof(struct params) ? STARVERBS_GO_ON : STARVERBS_BAD_PARAM;
}

STARVERBS_KERNEL(step)
{
	const struct params *params = (const struct params *)starverbs_mailbox.bytes;
	uint64_t *sent = &starverbs_mailbox.regs[0];

	if (*sent == params->times)
		return STARVERBS_OK;
	if (starverbs_send(params->qpn, params->key, params->va + *sent * sizeof(params->word), &params->word,
			   sizeof(params->word)))
		++*sent;
	return STARVERBS_GO_ON;
}
