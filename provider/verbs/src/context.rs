//! Contexts: a program's hold on the card of its process. One that was imported from another process is a
//! context of this process's card as well, in which objects of the other can be had.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use starverbs_core::{Gid, Mtu};
use starverbs_settings::Settings;

use crate::device::{Command, CommandReply, Device};
use crate::error::{Result, VerbsError};
use crate::events::{FdQueue, VerbsEvent};
use crate::info::{DeviceAttr, GID_TBL_LEN, GidEntry, PKEY, PortAttr};
use crate::mr::MrImports;
use crate::pd::{Domains, PdImports};
use crate::process;
use crate::share::{Exports, Importer};
use crate::stat::StatPage;

/// An open device. Clones are the same context.
#[derive(Clone)]
pub struct Context(Arc<ContextInner>);

struct ContextInner {
    device: Device,
    /// Forks of the process when it was opened: in a forked child it is the parent's
    forks: u32,
    events: Arc<FdQueue<VerbsEvent>>,
    /// How often it is open: once, and once for each import
    opened: AtomicU32,
    domains: Domains,
    side: ObjectsOf,
}

/// Whose objects a context has.
enum ObjectsOf {
    /// This process's, for others to import; `None`: no memory file could be had
    Own(Option<Exports>),
    /// Another process's
    Imported(Imported),
}

/// What a context has from another process.
pub(crate) struct Imported {
    pub(crate) from: Arc<Importer>,
    pub(crate) pds: PdImports,
    pub(crate) mrs: MrImports,
}

impl Context {
    /// `ibv_open_device`: joins the card of this process, which the first caller opens.
    ///
    /// # Errors
    /// Wrong settings, no address, or a port that cannot be opened.
    pub fn open() -> Result<Context> {
        Context::new(None, Device::of_process)
    }

    /// A context on a card of its own, with the given settings: for tests and tools.
    ///
    /// # Errors
    /// As [`Context::open`].
    pub fn open_with(settings: Settings) -> Result<Context> {
        Context::new(None, |events| Context::device_with(settings, events))
    }

    /// `ibv_import_device` of another process's context, by its [`command_fd`](Context::command_fd): a
    /// context of this process's card, in which objects of the other can be imported.
    ///
    /// # Errors
    /// EBADF, or EINVAL: the descriptor of something else; ENODEV: the exporter is gone, or not in sight;
    /// EOPNOTSUPP: its card is a board; and as [`Context::open`].
    pub fn import_from(fd: RawFd) -> Result<Context> {
        Context::new(Some(Context::imported_by(fd)?), Device::of_process)
    }

    /// As [`Context::import_from`], on a card of its own: for tests.
    ///
    /// # Errors
    /// As [`Context::import_from`].
    pub fn import_with(settings: Settings, fd: RawFd) -> Result<Context> {
        Context::new(Some(Context::imported_by(fd)?), |events| Context::device_with(settings, events))
    }

    /// On a device of a test's.
    #[cfg(test)]
    pub(crate) fn on(device: impl FnOnce(&Arc<FdQueue<VerbsEvent>>) -> Result<Device>) -> Result<Context> {
        Context::new(None, device)
    }

    fn device_with(settings: Settings, events: &Arc<FdQueue<VerbsEvent>>) -> Result<Device> {
        let stats = StatPage::create(std::process::id(), settings.port, 0)?;
        Device::open(settings, stats, events)
    }

    fn imported_by(fd: RawFd) -> Result<Imported> {
        let from = Arc::new(Importer::open(fd)?);
        Ok(Imported { from, pds: PdImports::default(), mrs: MrImports::default() })
    }

    /// `device` gives one that it has joined.
    fn new(
        imported: Option<Imported>,
        device: impl FnOnce(&Arc<FdQueue<VerbsEvent>>) -> Result<Device>,
    ) -> Result<Context> {
        let events = Arc::new(FdQueue::new()?);
        let device = device(&events)?;
        let exports = || ObjectsOf::Own(Exports::new(device.published()).ok());
        let side = imported.map_or_else(exports, ObjectsOf::Imported);
        let (opened, domains) = (AtomicU32::new(1), Domains::default());
        let forks = process::forks();
        Ok(Context(Arc::new(ContextInner { device, forks, events, opened, domains, side })))
    }

    /// The descriptor by which other processes import the context; whoever has it may. -1 if there is none: a
    /// context that was imported has the one that it came by.
    pub fn command_fd(&self) -> RawFd {
        self.exports().map_or(-1, Exports::fd)
    }

    /// Its protection domains, for imports in this process.
    pub(crate) fn domains(&self) -> &Domains {
        &self.0.domains
    }

    /// What others may import.
    pub(crate) fn exports(&self) -> Option<&Exports> {
        match &self.0.side {
            ObjectsOf::Own(exports) => exports.as_ref(),
            ObjectsOf::Imported(_) => None,
        }
    }

    /// What it has from another process.
    pub(crate) fn imported(&self) -> Option<&Imported> {
        match &self.0.side {
            ObjectsOf::Own(_) => None,
            ObjectsOf::Imported(imported) => Some(imported),
        }
    }

    /// `ibv_import_device` in its own process: the same context once more. It is closed when it was closed as
    /// often as it was opened.
    ///
    /// # Errors
    /// EINVAL when it is closed; EIO in a forked child.
    pub fn import(&self) -> Result<Context> {
        self.device()?;
        let more = |opened: u32| (opened > 0).then_some(opened + 1);
        match self.0.opened.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(_) => Ok(self.clone()),
            Err(_) => Err(VerbsError::Invalid("the context is closed")),
        }
    }

    /// Whether this process opened it, and is not a forked child of the one that did.
    pub fn is_ours(&self) -> bool {
        self.0.is_ours()
    }

    /// Whether it was opened more often than closed.
    pub fn is_open(&self) -> bool {
        self.0.opened.load(Ordering::Acquire) > 0
    }

    /// Whether the other one is this context, imported perhaps.
    pub fn same(&self, other: &Context) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// `ibv_close_device`: ends the QPs that are left; the card goes with its last context.
    pub fn close(&self) {
        let less = |opened: u32| opened.checked_sub(1);
        if self.0.opened.fetch_update(Ordering::AcqRel, Ordering::Acquire, less) == Ok(1) {
            self.0.leave();
        }
    }

    /// The device, for a call on the data path or off it.
    ///
    /// # Errors
    /// `Forked`: this process is a child of the one that opened it.
    #[inline]
    pub(crate) fn device(&self) -> Result<&Device> {
        if self.0.is_ours() { Ok(&self.0.device) } else { Err(VerbsError::Forked) }
    }

    /// The device, for clean-up, of which there is none in a forked child.
    pub(crate) fn device_if_ours(&self) -> Option<&Device> {
        self.device().ok()
    }

    /// Attributes of the device.
    pub fn device_attr(&self) -> &DeviceAttr {
        &self.0.device.info().attr
    }

    /// `ibv_query_port`: reads the attributes of a port.
    ///
    /// # Errors
    /// EINVAL unless `port` is 1.
    pub fn query_port(&self, port: u8) -> Result<PortAttr> {
        self.0.device.info().port(port)?;
        self.0.device.control(Command::QueryPort)?.port()
    }

    /// `ibv_query_gid_ex`: reads an entry of the GID table.
    ///
    /// # Errors
    /// EINVAL unless `port` is 1 and `index` lies in the table; ENODATA where the table is empty.
    pub fn query_gid(&self, port: u8, index: u32) -> Result<GidEntry> {
        self.0.device.info().port(port)?;
        self.0.device.control(Command::QueryGid { index })?.gid()
    }

    /// `ibv_query_gid_table`: reads the GID table, without its empty entries.
    pub fn gid_table(&self) -> Vec<GidEntry> {
        let entry =
            |index| self.0.device.control(Command::QueryGid { index }).and_then(CommandReply::gid).ok();
        (0..GID_TBL_LEN).filter_map(entry).collect()
    }

    /// Largest path MTU towards `dgid`: the port's, or, to an address of this host, what its loopback
    /// carries, unless the setting MTU says less.
    pub fn path_mtu(&self, dgid: Gid) -> Mtu {
        self.0.device.info().path_mtu(&dgid)
    }

    /// The calling thread, which may have polled until now, is about to sleep until something happens: the
    /// card's own thread takes over at once.
    pub fn about_to_sleep(&self) {
        if let Some(device) = self.device_if_ours() {
            device.arm();
        }
    }

    /// `ibv_query_pkey`, host byte order
    ///
    /// # Errors
    /// EINVAL unless `port` is 1 and `index` 0.
    pub fn query_pkey(&self, port: u8, index: u32) -> Result<u16> {
        self.0.device.info().port(port)?;
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
    pub fn get_async_event(&self) -> Result<VerbsEvent> {
        self.device()?;
        self.0.events.pop()
    }

    /// The queue of async events.
    pub(crate) fn events(&self) -> &Arc<FdQueue<VerbsEvent>> {
        &self.0.events
    }

    /// Adds an async event.
    pub(crate) fn raise(&self, event: VerbsEvent) {
        self.0.events.push(event);
    }

    /// Drops events of an object that is gone.
    pub(crate) fn purge_events(&self, gone: impl FnMut(&VerbsEvent) -> bool) {
        self.0.events.purge(gone);
    }
}

impl ContextInner {
    #[inline]
    fn is_ours(&self) -> bool {
        process::forks() == self.forks
    }

    fn leave(&self) {
        if self.is_ours() {
            if let ObjectsOf::Own(Some(exports)) = &self.side {
                exports.close();
                let _ = self.device.control(Command::Quiesce);
            }
            let _ = self.device.control(Command::FreeContext { events: &self.events });
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
