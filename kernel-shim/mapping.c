// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * What a process maps of its context: its doorbell page, its queue memory, nothing else.
 *
 * Pages are put in when they are touched. When the context has ended there are copies in their place, which
 * nobody looks at: a program finds out by its next call, and not by a signal.
 * A forked child has none of it: it has no business at the queues.
 */
#include <linux/mm.h>

#include "starverbs.h"

static struct star_context *star_context_of(struct vm_area_struct *vma)
{
	return vma->vm_file->private_data;
}

static void star_vma_open(struct vm_area_struct *vma)
{
	struct star_context *context = star_context_of(vma);
	struct star_buffer *buffer = vma->vm_private_data;

	if (!buffer)
		return;
	mutex_lock(&context->map_lock);
	buffer->maps++;
	mutex_unlock(&context->map_lock);
}

static void star_vma_close(struct vm_area_struct *vma)
{
	struct star_context *context = star_context_of(vma);
	struct star_buffer *buffer = vma->vm_private_data;

	if (!buffer)
		return;
	mutex_lock(&context->map_lock);
	star_buffer_put(context, buffer);
	mutex_unlock(&context->map_lock);
}

/*
 * What is mapped at an offset now; under map_lock. No page of it is counted as the process's: the context
 * has them all, and lives until the last VMA is gone. -ENOMEM: there is none for the place of what is gone
 */
static int star_pfn(struct star_context *context, struct star_buffer *buffer, u64 offset, unsigned long *pfn)
{
	struct page *page;

	if (!buffer && !context->dead) {
		*pfn = PHYS_PFN(context->board->doorbells +
				(u64)context->number * context->board->page_bytes + offset);
		return 0;
	}
	if (buffer) {
		page = star_buffer_page(buffer, (offset - buffer->offset) >> PAGE_SHIFT, context->dead);
	} else {
		if (!context->dummy)
			context->dummy = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
		page = context->dummy;
	}
	if (!page)
		return -ENOMEM;
	*pfn = page_to_pfn(page);
	return 0;
}

static vm_fault_t star_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct star_context *context = star_context_of(vma);
	u64 offset = (u64)vmf->pgoff << PAGE_SHIFT;
	vm_fault_t fault = VM_FAULT_OOM;
	unsigned long pfn;

	mutex_lock(&context->map_lock);
	if (!star_pfn(context, vma->vm_private_data, offset, &pfn))
		fault = vmf_insert_pfn(vma, vmf->address, pfn);
	mutex_unlock(&context->map_lock);
	return fault;
}

static const struct vm_operations_struct star_vm_operations = {
	.open = star_vma_open,
	.close = star_vma_close,
	.fault = star_fault,
};

int star_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct star_context *context = file->private_data;
	u64 offset = (u64)vma->vm_pgoff << PAGE_SHIFT;
	u64 bytes = vma->vm_end - vma->vm_start;
	struct star_buffer *buffer = NULL;
	int err = 0;

	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	if (vma->vm_flags & VM_EXEC)
		return -EPERM;
	if (current->mm != context->mm)
		return -EACCES;
	mutex_lock(&context->map_lock);
	if (context->dead) {
		err = -ENODEV;
	} else if (offset >= context->board->page_bytes) {
		buffer = star_buffer_find(context, offset, bytes);
		if (buffer)
			buffer->maps++;
		else
			err = -EINVAL;
	} else if (bytes > context->board->page_bytes - offset) {
		err = -EINVAL;
	}
	mutex_unlock(&context->map_lock);
	if (err)
		return err;
	if (!buffer)
		vma->vm_page_prot = pgprot_writecombine(vma->vm_page_prot);
	star_vm_flags(vma, VM_PFNMAP | VM_IO | VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP, VM_MAYEXEC);
	vma->vm_private_data = buffer;
	vma->vm_ops = &star_vm_operations;
	return 0;
}
