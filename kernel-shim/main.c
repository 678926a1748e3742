// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The driver of an RDMA board as docs/board.md of starverbs describes it: finds boards on the PCI bus, gives
 * each a character device, /dev/starN, and ends and restarts it. It knows no transport: programs post to
 * their queues and ring their doorbells by themselves.
 */
#include <linux/dma-mapping.h>
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "starverbs.h"

/* Boards at most */
#define STAR_BOARDS 256

static dev_t star_first;
static DEFINE_IDA(star_ids);

static struct class star_class = {
	.name = "starverbs",
};

static void star_device_release(struct device *dev)
{
	struct star_board *board = container_of(dev, struct star_board, dev);

	ida_free(&star_ids, board->id);
	pci_dev_put(board->pdev);
	kfree(board);
}

static void star_broken(struct work_struct *work)
{
	star_contexts_kill(container_of(work, struct star_board, broken));
}

static struct star_board *star_board_alloc(struct pci_dev *pdev)
{
	struct star_board *board = kzalloc(sizeof(*board), GFP_KERNEL);
	int i;

	if (!board)
		return ERR_PTR(-ENOMEM);
	i = ida_alloc_max(&star_ids, STAR_BOARDS - 1, GFP_KERNEL);
	if (i < 0) {
		kfree(board);
		return ERR_PTR(i);
	}
	board->id = i;
	board->pdev = pci_dev_get(pdev);
	mutex_init(&board->contexts_lock);
	INIT_LIST_HEAD(&board->contexts);
	mutex_init(&board->command_lock);
	INIT_WORK(&board->broken, star_broken);
	for (i = 0; i < STAR_VECTORS; i++) {
		spin_lock_init(&board->vector[i].lock);
		INIT_LIST_HEAD(&board->vector[i].contexts);
	}
	device_initialize(&board->dev);
	board->dev.class = &star_class;
	board->dev.parent = &pdev->dev;
	board->dev.devt = MKDEV(MAJOR(star_first), MINOR(star_first) + board->id);
	board->dev.release = star_device_release;
	board->dev.groups = star_board_groups;
	board->state = STAR_DOWN;
	return board;
}

static void star_free_interrupts(struct star_board *board)
{
	while (board->vectors) {
		board->vectors--;
		free_irq(pci_irq_vector(board->pdev, board->vectors), &board->vector[board->vectors]);
	}
	pci_free_irq_vectors(board->pdev);
}

static int star_request_interrupts(struct star_board *board)
{
	u32 most = readl(board->regs + STARVERBS_REG_VECTORS);
	int count, i, err;

	count = pci_alloc_irq_vectors(board->pdev, 1, clamp(most, 1U, (u32)STAR_VECTORS), PCI_IRQ_MSIX);
	if (count < 0)
		return dev_err_probe(&board->pdev->dev, count, "no interrupts\n");
	for (i = 0; i < count; i++) {
		err = request_irq(pci_irq_vector(board->pdev, i), star_interrupt, 0, dev_name(&board->dev),
				  &board->vector[i]);
		if (err) {
			star_free_interrupts(board);
			return err;
		}
		board->vectors++;
	}
	return 0;
}

static int star_enable_pci(struct pci_dev *pdev)
{
	int err;

	err = pci_enable_device_mem(pdev);
	if (err)
		return err;
	err = pci_request_mem_regions(pdev, "starverbs");
	if (err)
		goto disable;
	dma_set_max_seg_size(&pdev->dev, UINT_MAX);
	err = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(48));
	if (!err)
		err = devm_arch_io_reserve_memtype_wc(&pdev->dev,
						      pci_resource_start(pdev, STARVERBS_BAR_DOORBELLS),
						      pci_resource_len(pdev, STARVERBS_BAR_DOORBELLS));
	if (!err)
		return 0;
	pci_release_mem_regions(pdev);
disable:
	pci_disable_device(pdev);
	return err;
}

static void star_disable_pci(struct pci_dev *pdev)
{
	pci_release_mem_regions(pdev);
	pci_disable_device(pdev);
}

static int star_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct star_board *board;
	int err;

	err = star_enable_pci(pdev);
	if (err)
		return err;
	board = star_board_alloc(pdev);
	if (IS_ERR(board)) {
		err = PTR_ERR(board);
		goto release;
	}
	err = dev_set_name(&board->dev, "star%d", board->id);
	if (!err)
		err = star_board_map(board);
	if (err)
		goto put;
	err = star_request_interrupts(board);
	if (err)
		goto unmap;
	err = star_board_enable(board);
	if (err)
		goto interrupts;
	pci_set_drvdata(pdev, board);
	cdev_init(&board->cdev, &star_file_operations);
	board->cdev.owner = THIS_MODULE;
	err = cdev_device_add(&board->cdev, &board->dev);
	if (err)
		goto stop;
	dev_info(&pdev->dev, "%s: %u contexts, %u vectors\n", dev_name(&board->dev), board->pages - 1,
		 board->vectors);
	return 0;
stop:
	star_board_stop(board, STAR_GONE);
interrupts:
	star_free_interrupts(board);
unmap:
	star_board_unmap(board);
put:
	put_device(&board->dev);
release:
	star_disable_pci(pdev);
	return err;
}

/* The driver is unbound, or the board was pulled. Files that are open stay, without a board */
static void star_remove(struct pci_dev *pdev)
{
	struct star_board *board = pci_get_drvdata(pdev);

	cdev_device_del(&board->cdev, &board->dev);
	star_board_stop(board, STAR_GONE);
	cancel_work_sync(&board->broken);
	star_contexts_kill(board);
	star_free_interrupts(board);
	star_board_unmap(board);
	put_device(&board->dev);
	star_disable_pci(pdev);
}

static void star_shutdown(struct pci_dev *pdev)
{
	star_board_stop(pci_get_drvdata(pdev), STAR_GONE);
}

/* A reset ends all contexts; who wants to go on opens the device again */
static void star_reset_prepare(struct pci_dev *pdev)
{
	struct star_board *board = pci_get_drvdata(pdev);

	star_board_stop(board, STAR_DOWN);
	cancel_work_sync(&board->broken);
	star_contexts_kill(board);
}

static void star_reset_done(struct pci_dev *pdev)
{
	struct star_board *board = pci_get_drvdata(pdev);

	if (!star_board_enable(board))
		dev_info(&pdev->dev, "was reset\n");
}

static const struct pci_error_handlers star_error_handlers = {
	.reset_prepare = star_reset_prepare,
	.reset_done = star_reset_done,
};

/* A maker's own numbers come by new_id */
static const struct pci_device_id star_devices[] = {
	{ PCI_DEVICE(STARVERBS_PCI_VENDOR, STARVERBS_PCI_DEVICE) },
	{ }
};
MODULE_DEVICE_TABLE(pci, star_devices);

static struct pci_driver star_driver = {
	.name = "starverbs",
	.id_table = star_devices,
	.probe = star_probe,
	.remove = star_remove,
	.shutdown = star_shutdown,
	.err_handler = &star_error_handlers,
};

static int __init star_init(void)
{
	int err;

	err = alloc_chrdev_region(&star_first, 0, STAR_BOARDS, "starverbs");
	if (err)
		return err;
	err = class_register(&star_class);
	if (err)
		goto chrdev;
	err = pci_register_driver(&star_driver);
	if (err)
		goto class;
	return 0;
class:
	class_unregister(&star_class);
chrdev:
	unregister_chrdev_region(star_first, STAR_BOARDS);
	return err;
}
module_init(star_init);

static void __exit star_exit(void)
{
	pci_unregister_driver(&star_driver);
	class_unregister(&star_class);
	unregister_chrdev_region(star_first, STAR_BOARDS);
	ida_destroy(&star_ids);
}
module_exit(star_exit);

MODULE_DESCRIPTION("Character device of starverbs boards");
MODULE_LICENSE("Dual MIT/GPL");
