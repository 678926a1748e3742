//! Contexts: a program's hold on the card of its process.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use starverbs_settings::Settings;

use crate::card::Card;
use crate::device::{DeviceAttr, GidEntry, PKEY, PortAttr};
use crate::error::{Result, VerbsError};
use crate::events::{Event, FdQueue};
use crate::stat::StatPage;

/// An open device. Clones are the same context.
#[derive(Clone)]
pub struct Context(Arc<ContextInner>);

struct ContextInner {
    card: Arc<Card>,
    events: Arc<FdQueue<Event>>,
    /// How often it is open: once, and once for each import
    opened: AtomicU32,
}

impl Context {
    /// `ibv_open_device`: joins the card of this process, which the first caller opens.
    ///
    /// # Errors
    /// Wrong settings, no address, or a port that cannot be opened.
    pub fn open() -> Result<Context> {
        Context::join(Card::of_process()?)
    }

    /// A context on a card of its own, with the given settings: for tests and tools.
    ///
    /// # Errors
    /// As [`Context::open`].
    pub fn open_with(settings: Settings) -> Result<Context> {
        let stats = StatPage::create(std::process::id(), settings.port, 0)?;
        Context::join(Card::open(settings, stats)?)
    }

    fn join(card: Arc<Card>) -> Result<Context> {
        let events = Arc::new(FdQueue::new()?);
        card.enter()?;
        Ok(Context(Arc::new(ContextInner { card, events, opened: AtomicU32::new(1) })))
    }

    /// `ibv_import_device`: the same context once more. It is closed when it was closed as often as it was opened.
    ///
    /// # Errors
    /// EINVAL when it is closed; EIO in a forked child.
    pub fn import(&self) -> Result<Context> {
        self.card()?;
        let more = |opened: u32| (opened > 0).then_some(opened + 1);
        match self.0.opened.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(_) => Ok(self.clone()),
            Err(_) => Err(VerbsError::Invalid("the context is closed")),
        }
    }

    /// Whether it was opened more often than closed.
    pub fn is_open(&self) -> bool {
        self.0.opened.load(Ordering::Acquire) > 0
    }

    /// Whether the other one is this context, imported perhaps.
    pub(crate) fn same(&self, other: &Context) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// `ibv_close_device`: ends the QPs that are left; the card goes with its last context.
    pub fn close(&self) {
        let less = |opened: u32| opened.checked_sub(1);
        if self.0.opened.fetch_update(Ordering::AcqRel, Ordering::Acquire, less) == Ok(1) {
            self.0.leave();
        }
    }

    /// The card, for a call on the data path or off it.
    ///
    /// # Errors
    /// `Forked`: this process is a child of the one that opened it.
    #[inline]
    pub(crate) fn card(&self) -> Result<&Arc<Card>> {
        if self.0.card.is_ours() { Ok(&self.0.card) } else { Err(VerbsError::Forked) }
    }

    /// The card, also in a forked child: for clean-up, which then does nothing.
    pub(crate) fn card_if_ours(&self) -> Option<&Arc<Card>> {
        self.card().ok()
    }

    /// Attributes of the device.
    pub fn device_attr(&self) -> &DeviceAttr {
        &self.0.card.info.attr
    }

    /// `ibv_query_port`
    ///
    /// # Errors
    /// EINVAL unless `port` is 1.
    pub fn query_port(&self, port: u8) -> Result<PortAttr> {
        self.0.card.info.port(port).copied()
    }

    /// `ibv_query_gid_ex`
    ///
    /// # Errors
    /// EINVAL unless `port` is 1 and `index` lies in the table; ENODATA where the table is empty.
    pub fn query_gid(&self, port: u8, index: u32) -> Result<GidEntry> {
        self.0.card.info.port(port)?;
        self.0.card.info.gid(index)
    }

    /// `ibv_query_gid_table`
    pub fn gid_table(&self) -> Vec<GidEntry> {
        self.0.card.info.gid_table()
    }

    /// `ibv_query_pkey`, host byte order
    ///
    /// # Errors
    /// EINVAL unless `port` is 1 and `index` 0.
    pub fn query_pkey(&self, port: u8, index: u32) -> Result<u16> {
        self.0.card.info.port(port)?;
        if index == 0 { Ok(PKEY) } else { Err(VerbsError::Invalid("P_Key index")) }
    }

    /// The descriptor of async events: readable while one waits.
    pub fn async_fd(&self) -> RawFd {
        self.0.events.fd()
    }

    /// `ibv_get_async_event`: blocks, unless the program sets O_NONBLOCK on the descriptor.
    ///
    /// # Errors
    /// `Again`, EINTR; EIO in a forked child.
    pub fn get_async_event(&self) -> Result<Event> {
        self.card()?;
        self.0.events.pop()
    }

    /// The queue of async events.
    pub(crate) fn events(&self) -> &Arc<FdQueue<Event>> {
        &self.0.events
    }

    /// Adds an async event.
    pub(crate) fn raise(&self, event: Event) {
        self.0.events.push(event);
    }

    /// Drops events of an object that is gone.
    pub(crate) fn purge_events(&self, gone: impl FnMut(&Event) -> bool) {
        self.0.events.purge(gone);
    }
}

impl ContextInner {
    fn leave(&self) {
        if self.card.is_ours() {
            self.card.leave(&self.events);
        }
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        if *self.opened.get_mut() > 0 {
            self.leave();
        }
    }
}
