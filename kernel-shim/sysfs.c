// SPDX-License-Identifier: GPL-2.0 OR MIT
/* /sys/class/starverbs/starN: what a board is, in which state, who uses it, and what it has counted. */
#include <linux/io.h>
#include <linux/sysfs.h>

#include "starverbs.h"

static struct star_board *star_board_of(struct device *dev)
{
	return container_of(dev, struct star_board, dev);
}

static ssize_t state_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	static const char *const names[] = {
		[STAR_UP] = "up",
		[STAR_DOWN] = "down",
		[STAR_BROKEN] = "broken",
		[STAR_GONE] = "gone",
	};

	return sysfs_emit(buf, "%s\n", names[READ_ONCE(star_board_of(dev)->state)]);
}
static DEVICE_ATTR_RO(state);

static ssize_t version_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	u32 version = star_board_of(dev)->version;

	return sysfs_emit(buf, "%u.%u\n", version >> 16, version & 0xffff);
}
static DEVICE_ATTR_RO(version);

static ssize_t capabilities_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%#llx\n", star_board_of(dev)->caps);
}
static DEVICE_ATTR_RO(capabilities);

/* Where QP contexts are that have no room on chip */
static ssize_t qpc_placement_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct star_board *board = star_board_of(dev);
	u32 placement = 0;
	int err = -ENODEV;

	mutex_lock(&board->command_lock);
	if (board->state == STAR_UP) {
		placement = readl(board->regs + STARVERBS_REG_QPC_PLACEMENT);
		err = 0;
	}
	mutex_unlock(&board->command_lock);
	return err ?: sysfs_emit(buf, "%s\n", placement == STARVERBS_QPC_IN_HOST ? "host" : "board");
}
static DEVICE_ATTR_RO(qpc_placement);

/* Open files, whether alive or ended with the board */
static ssize_t contexts_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct star_board *board = star_board_of(dev);
	struct star_context *context;
	unsigned int count = 0;

	mutex_lock(&board->contexts_lock);
	list_for_each_entry(context, &board->contexts, node)
		count++;
	mutex_unlock(&board->contexts_lock);
	return sysfs_emit(buf, "%u\n", count);
}
static DEVICE_ATTR_RO(contexts);

/* Of context 0's and all programs' commands and queues together, since the board was started */
static ssize_t star_counter_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct star_board *board = star_board_of(dev);
	unsigned long number = (unsigned long)container_of(attr, struct dev_ext_attribute, attr)->var;
	u64 value = 0;
	int err = -ENODEV;

	mutex_lock(&board->command_lock);
	if (board->state == STAR_UP) {
		value = readq(board->regs + STARVERBS_REG_COUNTERS + number * sizeof(value));
		err = 0;
	}
	mutex_unlock(&board->command_lock);
	return err ?: sysfs_emit(buf, "%llu\n", value);
}

#define STAR_COUNTER(_name, _number)						\
	static struct dev_ext_attribute star_counter_##_name = {		\
		.attr = __ATTR(_name, 0444, star_counter_show, NULL),		\
		.var = (void *)(unsigned long)(_number),			\
	}

STAR_COUNTER(doorbells, STARVERBS_COUNTER_DOORBELLS);
STAR_COUNTER(send_fetches, STARVERBS_COUNTER_SEND_FETCHES);
STAR_COUNTER(recv_fetches, STARVERBS_COUNTER_RECV_FETCHES);
STAR_COUNTER(cqe_writes, STARVERBS_COUNTER_CQE_WRITES);
STAR_COUNTER(event_writes, STARVERBS_COUNTER_EVENT_WRITES);
STAR_COUNTER(interrupts, STARVERBS_COUNTER_INTERRUPTS);
STAR_COUNTER(dma_reads, STARVERBS_COUNTER_DMA_READS);
STAR_COUNTER(dma_writes, STARVERBS_COUNTER_DMA_WRITES);
STAR_COUNTER(dma_misses, STARVERBS_COUNTER_DMA_MISSES);
STAR_COUNTER(commands, STARVERBS_COUNTER_COMMANDS);
STAR_COUNTER(commands_refused, STARVERBS_COUNTER_COMMANDS_REFUSED);
STAR_COUNTER(malformed, STARVERBS_COUNTER_MALFORMED);
STAR_COUNTER(qpc_hits, STARVERBS_COUNTER_QPC_HITS);
STAR_COUNTER(qpc_misses, STARVERBS_COUNTER_QPC_MISSES);
STAR_COUNTER(qpc_waited, STARVERBS_COUNTER_QPC_WAITED);
STAR_COUNTER(qpc_prefetched, STARVERBS_COUNTER_QPC_PREFETCHED);
STAR_COUNTER(qpc_evicted, STARVERBS_COUNTER_QPC_EVICTED);

static struct attribute *star_board_attrs[] = {
	&dev_attr_state.attr,
	&dev_attr_version.attr,
	&dev_attr_capabilities.attr,
	&dev_attr_contexts.attr,
	&dev_attr_qpc_placement.attr,
	NULL
};

static const struct attribute_group star_board_group = {
	.attrs = star_board_attrs,
};

static struct attribute *star_counter_attrs[] = {
	&star_counter_doorbells.attr.attr,
	&star_counter_send_fetches.attr.attr,
	&star_counter_recv_fetches.attr.attr,
	&star_counter_cqe_writes.attr.attr,
	&star_counter_event_writes.attr.attr,
	&star_counter_interrupts.attr.attr,
	&star_counter_dma_reads.attr.attr,
	&star_counter_dma_writes.attr.attr,
	&star_counter_dma_misses.attr.attr,
	&star_counter_commands.attr.attr,
	&star_counter_commands_refused.attr.attr,
	&star_counter_malformed.attr.attr,
	&star_counter_qpc_hits.attr.attr,
	&star_counter_qpc_misses.attr.attr,
	&star_counter_qpc_waited.attr.attr,
	&star_counter_qpc_prefetched.attr.attr,
	&star_counter_qpc_evicted.attr.attr,
	NULL
};

static const struct attribute_group star_counter_group = {
	.name = "counters",
	.attrs = star_counter_attrs,
};

const struct attribute_group *star_board_groups[] = {
	&star_board_group,
	&star_counter_group,
	NULL
};
