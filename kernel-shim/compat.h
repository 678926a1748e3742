/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* What kernels since 6.1 call differently. */
#ifndef STARVERBS_COMPAT_H
#define STARVERBS_COMPAT_H

#include <linux/eventfd.h>
#include <linux/mm.h>
#include <linux/version.h>

static inline void star_eventfd_signal(struct eventfd_ctx *eventfd)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 8, 0)
	eventfd_signal(eventfd, 1);
#else
	eventfd_signal(eventfd);
#endif
}

static inline void star_vm_flags(struct vm_area_struct *vma, vm_flags_t set, vm_flags_t clear)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
	vma->vm_flags = (vma->vm_flags | set) & ~clear;
#else
	vm_flags_mod(vma, set, clear);
#endif
}

/*
 * Pins pages of the process that calls, for long. Before 6.2, one pinned for reading that was not the
 * process's own yet (the zeros that all share, or a file's in a private mapping) was another one once the
 * process wrote there, and the board went on reading the first. So it is made its own first.
 */
static inline int star_pin_pages(unsigned long at, int count, bool writable, struct page **pages)
{
	unsigned int flags = FOLL_LONGTERM | (writable ? FOLL_WRITE : 0);

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
	if (!writable) {
		int pinned = pin_user_pages_fast(at, count, flags | FOLL_WRITE | FOLL_FORCE, pages);

		/* a shared mapping that is not for writing has no such pages */
		if (pinned != -EFAULT)
			return pinned;
	}
#endif
	return pin_user_pages_fast(at, count, flags, pages);
}

#endif
