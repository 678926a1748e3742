/* A kernel that breaks the rules, as the first word of its parameters says. */
#include <starverbs/kernel.h>

enum { ENDLESS = 1, WILD, NOWHERE, MANY, DEEP };

static volatile uint32_t word;

static int deep(uint32_t n)
{
	volatile char room[64] = { 0 };

	return n ? deep(n - 1) + room[n % sizeof(room)] : 0;
}

STARVERBS_KERNEL(start)
{
	return STARVERBS_GO_ON;
}

STARVERBS_KERNEL(step)
{
	const uint32_t *params = (const void *)starverbs_mailbox.bytes;

	switch (params[0]) {
	case ENDLESS:
		for (;;)
			word++;
	case WILD:
		*(volatile uint32_t *)(uintptr_t)0xfffffff0 = 1;
		break;
	case NOWHERE:
		starverbs_write(params[1], 0, (const void *)(uintptr_t)0x7fffffff, 8);
		return STARVERBS_GO_ON;
	case MANY:
		starverbs_mailbox.commands = 1 << 20;
		return STARVERBS_GO_ON;
	case DEEP:
		word = (uint32_t)deep(1 << 20);
		break;
	}
	return STARVERBS_OK;
}
