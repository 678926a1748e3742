//! Completion channels and events of IBVERBS_1.0.
//!
//! ibv_create_comp_channel and ibv_destroy_comp_channel have one symbol for both generations, and tell by
//! what they get.

use super::layout::{ChannelFields, OldChannel, OldContext, OldCq, OldQp, OldSrq};
use super::{Old, device};
use crate::edge;
use crate::events::{self, Subject};
use crate::handle::{LiveHandles, cookie};
use core::ffi::{c_int, c_uint, c_void};
use core::ptr::null_mut;
use starverbs_abi as abi;
use std::sync::LazyLock;

/// The old channels that are alive: nothing in a channel says of which generation it is.
static CHANNELS: LazyLock<LiveHandles> = LazyLock::new(LiveHandles::default);

/// ibv_create_comp_channel(3), for contexts of both generations.
pub(crate) unsafe extern "C" fn create_comp_channel(context: *mut c_void) -> *mut c_void {
    // SAFETY: the verb's terms.
    unsafe {
        if !device::is_old(context) {
            return events::create_comp_channel(context.cast()).cast();
        }
        let context = OldContext::real(context.cast());
        let public = ChannelFields { fd: -1 };
        let channel: *mut OldChannel =
            Old::make(public, |_| events::create_comp_channel(context), |public, real| public.fd = real.fd);
        if !channel.is_null() {
            CHANNELS.add(cookie(channel));
        }
        channel.cast()
    }
}

/// ibv_destroy_comp_channel(3), for channels of both generations.
pub(crate) unsafe extern "C" fn destroy_comp_channel(channel: *mut c_void) -> c_int {
    let name = cookie(channel);
    if !CHANNELS.with(name, || ()) {
        // SAFETY: the verb's terms.
        return unsafe { events::destroy_comp_channel(channel.cast()) };
    }
    // Off the list before its address may be another channel's.
    CHANNELS.remove(name);
    // SAFETY: the verb's terms: a listed channel is an old one.
    let failed = unsafe { OldChannel::end(channel.cast(), events::destroy_comp_channel) };
    if failed != 0 {
        CHANNELS.add(name);
    }
    failed
}

/// ibv_get_cq_event(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn get_cq_event(
    channel: *mut OldChannel,
    cq: *mut *mut OldCq,
    cq_context: *mut *mut c_void,
) -> c_int {
    if cq.is_null() || cq_context.is_null() {
        edge::set_errno(libc::EINVAL);
        return -1;
    }
    let (mut real, mut name) = (null_mut(), null_mut());
    // SAFETY: the verb's terms. Today's queue has the old one as its context, and the event keeps both alive
    // until it is acknowledged.
    unsafe {
        let failed = events::get_cq_event(Old::real(channel), &mut real, &mut name);
        if failed == 0 {
            let old = name.cast::<OldCq>();
            cq.write(old);
            cq_context.write((*old).public.cq_context);
        }
        failed
    }
}

/// ibv_ack_cq_events(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn ack_cq_events(cq: *mut OldCq, events: c_uint) {
    // SAFETY: the verb's terms.
    unsafe { events::ack_cq_events(Old::real(cq), events) };
}

/// ibv_get_async_event(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn get_async_event(
    context: *mut OldContext,
    event: *mut abi::ibv_async_event,
) -> c_int {
    // SAFETY: the verb's terms. Today's object has the old one as its context, and the event keeps both alive
    // until it is acknowledged.
    unsafe {
        let failed = events::get_async_event(Old::real(context), event);
        if failed == 0 {
            let element = &raw mut (*event).element;
            match Subject::of((*event).event_type) {
                Subject::Cq => (*element).cq = (*(*element).cq).cq_context.cast(),
                Subject::Qp => (*element).qp = (*(*element).qp).qp_context.cast(),
                Subject::Srq => (*element).srq = (*(*element).srq).srq_context.cast(),
                Subject::Device => {}
            }
        }
        failed
    }
}

/// ibv_ack_async_event(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn ack_async_event(event: *mut abi::ibv_async_event) {
    // SAFETY: the verb's terms: the event is as ibv_get_async_event gave it.
    unsafe {
        let Some(event) = event.as_ref() else { return };
        let mut today = *event;
        let element = &raw mut today.element;
        match Subject::of(event.event_type) {
            Subject::Cq => (*element).cq = OldCq::real((*element).cq.cast()),
            Subject::Qp => (*element).qp = OldQp::real((*element).qp.cast()),
            Subject::Srq => (*element).srq = OldSrq::real((*element).srq.cast()),
            Subject::Device => {}
        }
        events::ack_async_event(&mut today);
    }
}
