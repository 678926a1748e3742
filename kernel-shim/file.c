// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The character device: a context for each open file, and what its process asks of it. */
#include <linux/sched/mm.h>
#include <linux/uaccess.h>

#include "starverbs.h"

static int star_open(struct inode *inode, struct file *file)
{
	struct star_board *board = container_of(inode->i_cdev, struct star_board, cdev);
	struct star_context *context;

	get_device(&board->dev);
	context = star_context_open(board, file->f_mapping);
	if (IS_ERR(context)) {
		put_device(&board->dev);
		return PTR_ERR(context);
	}
	file->private_data = context;
	return nonseekable_open(inode, file);
}

static int star_release(struct inode *inode, struct file *file)
{
	struct star_context *context = file->private_data;
	struct star_board *board = context->board;

	star_context_close(context);
	put_device(&board->dev);
	return 0;
}

static long star_ioctl_info(struct star_context *context, void __user *to)
{
	struct starverbs_info info = {
		.caps = context->board->caps & star_caps,
		.events = context->events->offset,
		.events_log = STAR_EVENTS_LOG,
		.version = context->board->version,
		.cells = context->board->cells,
	};

	return copy_to_user(to, &info, sizeof(info)) ? -EFAULT : 0;
}

static long star_ioctl_command(struct star_context *context, void __user *at)
{
	struct star_slot command, asked;
	int err;

	BUILD_BUG_ON(sizeof(command) != sizeof(struct starverbs_command));
	if (copy_from_user(&command, at, sizeof(command)))
		return -EFAULT;
	asked = command;
	command.head.status = 0;
	err = star_context_command(context, &command);
	if (err)
		return err;
	/* a command that failed is as it was, but for its status */
	if (command.head.status) {
		asked.head.status = command.head.status;
		command = asked;
	}
	return copy_to_user(at, &command, sizeof(command)) ? -EFAULT : 0;
}

static long star_ioctl_queue_memory(struct star_context *context, void __user *at)
{
	struct starverbs_queue_memory memory;
	struct star_buffer *buffer;

	if (copy_from_user(&memory, at, sizeof(memory)))
		return -EFAULT;
	mutex_lock(&context->lock);
	buffer = context->dead ? ERR_PTR(-ENODEV) : star_buffer_new(context, memory.bytes);
	if (!IS_ERR(buffer)) {
		memory.bytes = buffer->bytes;
		memory.offset = buffer->offset;
	}
	mutex_unlock(&context->lock);
	if (IS_ERR(buffer))
		return PTR_ERR(buffer);
	return copy_to_user(at, &memory, sizeof(memory)) ? -EFAULT : 0;
}

static long star_ioctl_free_queue_memory(struct star_context *context, void __user *at)
{
	struct starverbs_queue_memory memory;

	if (copy_from_user(&memory, at, sizeof(memory)))
		return -EFAULT;
	return star_buffer_end(context, memory.offset);
}

static long star_ioctl_eventfd(struct star_context *context, void __user *at)
{
	struct starverbs_eventfd eventfd;

	if (copy_from_user(&eventfd, at, sizeof(eventfd)))
		return -EFAULT;
	return star_context_eventfd(context, eventfd.fd);
}

static long star_ioctl(struct file *file, unsigned int request, unsigned long arg)
{
	struct star_context *context = file->private_data;
	void __user *at = (void __user *)arg;

	if (current->mm != context->mm)
		return -EACCES;
	if (READ_ONCE(context->dead) || READ_ONCE(context->board->state) != STAR_UP)
		return -ENODEV;
	switch (request) {
	case STARVERBS_IOC_INFO:
		return star_ioctl_info(context, at);
	case STARVERBS_IOC_COMMAND:
		return star_ioctl_command(context, at);
	case STARVERBS_IOC_QUEUE_MEMORY:
		return star_ioctl_queue_memory(context, at);
	case STARVERBS_IOC_FREE_QUEUE_MEMORY:
		return star_ioctl_free_queue_memory(context, at);
	case STARVERBS_IOC_EVENTFD:
		return star_ioctl_eventfd(context, at);
	default:
		return -ENOTTY;
	}
}

const struct file_operations star_file_operations = {
	.owner = THIS_MODULE,
	.open = star_open,
	.release = star_release,
	.unlocked_ioctl = star_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = star_mmap,
};
