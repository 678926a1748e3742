// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The board's registers and command queue.
 *
 * Every wait is bounded. A board that does not answer in time, or whose registers read as all ones, is
 * broken: it loses its right to DMA, so that memory which it was given can be taken back, and its contexts
 * end. A reset of the function brings it back.
 */
#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/moduleparam.h>

#include "starverbs.h"

static unsigned int qpc_log;
module_param(qpc_log, uint, 0444);
MODULE_PARM_DESC(qpc_log, "log2 of the QP contexts of a function that lie in the host's memory; 0: none do");

/* QPNs have 24 bits */
#define STAR_QPC_LOG_MAX 24

/* How long a command may take */
#define STAR_PATIENCE (5 * HZ)
/* Looks at a command's status before the first sleep */
#define STAR_SPINS 1000
/* Longest sleep between two looks, in microseconds */
#define STAR_NAP 1000
/* log2 of the entries of the event queue of context 0, which gets none */
#define STAR_NO_EVENTS_LOG 6
#define STAR_NO_EVENTS_BYTES (sizeof(struct starverbs_event) << STAR_NO_EVENTS_LOG)

static u32 star_read(struct star_board *board, u32 reg)
{
	return readl(board->regs + reg);
}

static void star_write(struct star_board *board, u32 reg, u32 value)
{
	writel(value, board->regs + reg);
}

static bool star_is_absent(struct star_board *board)
{
	return star_read(board, STARVERBS_REG_MAGIC) != STARVERBS_MAGIC;
}

/* What the board says of itself, checked against its BARs */
static int star_board_check(struct star_board *board)
{
	struct device *dev = &board->pdev->dev;
	resource_size_t room = pci_resource_len(board->pdev, STARVERBS_BAR_DOORBELLS);
	u32 contexts;

	board->version = star_read(board, STARVERBS_REG_VERSION);
	if (star_is_absent(board) || board->version >> 16 != STARVERBS_VERSION >> 16)
		return dev_err_probe(dev, -ENODEV, "no board, or of another version: %#x\n", board->version);
	board->caps = star_read(board, STARVERBS_REG_CAPS) |
		      (u64)star_read(board, STARVERBS_REG_CAPS + 4) << 32;
	board->cells = star_read(board, STARVERBS_REG_CELLS);
	contexts = star_read(board, STARVERBS_REG_CONTEXTS);
	if (!board->cells || board->cells > SZ_16M)
		return dev_err_probe(dev, -EIO, "a doorbell page of %u cells\n", board->cells);
	board->page_bytes = (size_t)board->cells * STARVERBS_CELL_BYTES;
	if (!IS_ALIGNED(board->page_bytes, PAGE_SIZE) || !IS_ALIGNED(board->doorbells, PAGE_SIZE))
		return dev_err_probe(dev, -EIO, "doorbell pages that cannot be mapped apart\n");
	board->pages = min_t(u64, contexts, room / board->page_bytes);
	if (board->pages < 2)
		return dev_err_probe(dev, -EIO, "no doorbell page for a program\n");
	return 0;
}

/* Memory for QP contexts, if that was asked for; the board may not take any */
static int star_board_alloc_qpc(struct star_board *board)
{
	struct device *dev = &board->pdev->dev;

	if (!qpc_log)
		return 0;
	if (qpc_log > STAR_QPC_LOG_MAX)
		return dev_err_probe(dev, -EINVAL, "qpc_log is %u at most\n", STAR_QPC_LOG_MAX);
	if (!(board->caps & STARVERBS_CAP_QPC_HOST)) {
		dev_warn(dev, "keeps all QP contexts itself\n");
		return 0;
	}
	board->qpc_bytes = (size_t)STARVERBS_QPC_BYTES << qpc_log;
	board->qpc = dma_alloc_coherent(dev, board->qpc_bytes, &board->qpc_dma, GFP_KERNEL);
	if (!board->qpc)
		return dev_err_probe(dev, -ENOMEM, "no memory for 2^%u QP contexts\n", qpc_log);
	return 0;
}

static void star_board_free_qpc(struct star_board *board)
{
	if (board->qpc)
		dma_free_coherent(&board->pdev->dev, board->qpc_bytes, board->qpc, board->qpc_dma);
}

/* Maps the registers and makes the memory that the board is given for itself */
int star_board_map(struct star_board *board)
{
	struct pci_dev *pdev = board->pdev;
	int err;

	if (pci_resource_len(pdev, STARVERBS_BAR_CONTROL) < STARVERBS_CONTROL_BYTES)
		return -EIO;
	board->regs = pci_iomap(pdev, STARVERBS_BAR_CONTROL, STARVERBS_CONTROL_BYTES);
	if (!board->regs)
		return -ENOMEM;
	board->doorbells = pci_resource_start(pdev, STARVERBS_BAR_DOORBELLS);
	err = star_board_check(board);
	if (err)
		goto unmap;
	err = star_board_alloc_qpc(board);
	if (err)
		goto unmap;
	err = -ENOMEM;
	board->slot = dma_alloc_coherent(&pdev->dev, sizeof(*board->slot), &board->slot_dma, GFP_KERNEL);
	if (!board->slot)
		goto free_qpc;
	board->events = dma_alloc_coherent(&pdev->dev, STAR_NO_EVENTS_BYTES, &board->events_dma, GFP_KERNEL);
	if (!board->events)
		goto free_slot;
	return 0;
free_slot:
	dma_free_coherent(&pdev->dev, sizeof(*board->slot), board->slot, board->slot_dma);
free_qpc:
	star_board_free_qpc(board);
unmap:
	pci_iounmap(pdev, board->regs);
	return err;
}

void star_board_unmap(struct star_board *board)
{
	struct pci_dev *pdev = board->pdev;

	dma_free_coherent(&pdev->dev, STAR_NO_EVENTS_BYTES, board->events, board->events_dma);
	dma_free_coherent(&pdev->dev, sizeof(*board->slot), board->slot, board->slot_dma);
	star_board_free_qpc(board);
	pci_iounmap(pdev, board->regs);
}

/* Has the board work, from a clean start */
int star_board_enable(struct star_board *board)
{
	u32 status, error;

	mutex_lock(&board->command_lock);
	pci_set_master(board->pdev);
	star_write(board, STARVERBS_REG_CONTROL, STARVERBS_CTRL_RESET);
	writeq(board->slot_dma, board->regs + STARVERBS_REG_COMMANDS);
	writeq(board->events_dma, board->regs + STARVERBS_REG_EVENTS);
	star_write(board, STARVERBS_REG_COMMANDS_LOG, 0);
	star_write(board, STARVERBS_REG_EVENTS_LOG, STAR_NO_EVENTS_LOG);
	if (board->qpc) {
		writeq(board->qpc_dma, board->regs + STARVERBS_REG_QPC_MEMORY);
		star_write(board, STARVERBS_REG_QPC_MEMORY_LOG, qpc_log);
	}
	star_write(board, STARVERBS_REG_CONTROL, STARVERBS_CTRL_ENABLE);
	status = star_read(board, STARVERBS_REG_STATUS);
	error = star_read(board, STARVERBS_REG_ERROR);
	board->tail = 0;
	if (star_is_absent(board) || !(status & STARVERBS_STATUS_ENABLED)) {
		pci_clear_master(board->pdev);
		mutex_unlock(&board->command_lock);
		dev_err(&board->pdev->dev, "does not start: status %#x, error %u\n", status, error);
		return -EIO;
	}
	board->state = STAR_UP;
	mutex_unlock(&board->command_lock);
	return 0;
}

/* Has the board forget everything; when this returns it reaches no memory any more */
void star_board_stop(struct star_board *board, enum star_state state)
{
	mutex_lock(&board->command_lock);
	if (!star_is_absent(board)) {
		star_write(board, STARVERBS_REG_CONTROL, STARVERBS_CTRL_RESET);
		/* the write has arrived when this read is answered */
		star_read(board, STARVERBS_REG_STATUS);
	}
	pci_clear_master(board->pdev);
	board->state = state;
	mutex_unlock(&board->command_lock);
}

/* Under command_lock */
static void star_board_broken(struct star_board *board, const char *why)
{
	dev_err(&board->pdev->dev, "%s: a reset of the function brings it back\n", why);
	pci_clear_master(board->pdev);
	board->state = STAR_BROKEN;
	schedule_work(&board->broken);
}

/* The board did what its contract forbids: it may reach memory that it must not */
void star_board_fail(struct star_board *board, const char *why)
{
	mutex_lock(&board->command_lock);
	if (board->state == STAR_UP)
		star_board_broken(board, why);
	mutex_unlock(&board->command_lock);
}

/* Waits for the one command in the queue; -ENODEV: in vain */
static int star_wait(struct star_board *board, u32 *status)
{
	unsigned long deadline = jiffies + STAR_PATIENCE;
	unsigned long nap = 10;
	bool is_late = false;
	unsigned int spins;

	for (spins = 0; ; spins++) {
		*status = READ_ONCE(board->slot->head.status);
		if (*status != STARVERBS_PENDING) {
			/* the status before the answer */
			dma_rmb();
			return 0;
		}
		if (spins < STAR_SPINS) {
			cpu_relax();
			continue;
		}
		/* only after one more look: this may have slept for long itself */
		if (is_late) {
			star_board_broken(board, "a command was not answered");
			return -ENODEV;
		}
		if (star_is_absent(board)) {
			star_board_broken(board, "the board is gone");
			return -ENODEV;
		}
		is_late = time_after(jiffies, deadline);
		usleep_range(nap, 2 * nap);
		nap = min_t(unsigned long, 2 * nap, STAR_NAP);
	}
}

/*
 * Carries out a command: body has STAR_BODY_BYTES, and the answer afterwards if the status is 0; the
 * status is the board's errno. -ENODEV: the board takes none, or did not answer.
 */
int star_command(struct star_board *board, u32 context, u16 op, void *body, u32 *status)
{
	struct star_slot *slot = board->slot;
	int err;

	mutex_lock(&board->command_lock);
	err = -ENODEV;
	if (board->state != STAR_UP)
		goto unlock;
	slot->head.op = op;
	slot->head.context = context;
	WRITE_ONCE(slot->head.status, STARVERBS_PENDING);
	memcpy(slot->body, body, STAR_BODY_BYTES);
	/* writel orders what was stored before it */
	star_write(board, STARVERBS_REG_COMMANDS_TAIL, ++board->tail);
	err = star_wait(board, status);
	if (!err && !*status)
		memcpy(body, slot->body, STAR_BODY_BYTES);
unlock:
	mutex_unlock(&board->command_lock);
	return err;
}
