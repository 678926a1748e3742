//! The few verbs that the scale measurements need, from whatever libibverbs.so.1 the loader finds.
//!
//! Owns the loading and the unsafe calls. It loads at run time, so that this program builds and measures the
//! other rows where no card has been built. It must not know what is measured.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use starverbs_abi as abi;

use crate::error::{BenchError, Result};

type GetDeviceList = unsafe extern "C" fn(*mut c_int) -> *mut *mut abi::ibv_device;
type OpenDevice = unsafe extern "C" fn(*mut abi::ibv_device) -> *mut abi::ibv_context;
type QueryGid = unsafe extern "C" fn(*mut abi::ibv_context, u8, c_int, *mut abi::ibv_gid) -> c_int;
type AllocPd = unsafe extern "C" fn(*mut abi::ibv_context) -> *mut abi::ibv_pd;
type CreateCq = unsafe extern "C" fn(
    *mut abi::ibv_context,
    c_int,
    *mut c_void,
    *mut abi::ibv_comp_channel,
    c_int,
) -> *mut abi::ibv_cq;
type CreateQp = unsafe extern "C" fn(*mut abi::ibv_pd, *mut abi::ibv_qp_init_attr) -> *mut abi::ibv_qp;
type ModifyQp = unsafe extern "C" fn(*mut abi::ibv_qp, *mut abi::ibv_qp_attr, c_int) -> c_int;
type DestroyQp = unsafe extern "C" fn(*mut abi::ibv_qp) -> c_int;

/// An open device with one PD and one CQ. Never closed: its process ends right after the measurement.
pub(crate) struct Device {
    pd: *mut abi::ibv_pd,
    cq: *mut abi::ibv_cq,
    gid: abi::ibv_gid,
    create_qp: CreateQp,
    modify_qp: ModifyQp,
    destroy_qp: DestroyQp,
}

/// A queue pair of a [`Device`].
pub(crate) struct Qp(*mut abi::ibv_qp);

fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void> {
    // SAFETY: the handle came from dlopen and is never closed; the name is NUL-terminated.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    if address.is_null() {
        Err(BenchError::Os { what: "dlsym", message: name.to_string_lossy().into_owned() })
    } else {
        Ok(address)
    }
}

macro_rules! function {
    ($library:expr, $name:literal, $type:ty) => {
        // SAFETY: the symbol is libibverbs' function of this name, whose signature in verbs.h is this type.
        unsafe { std::mem::transmute::<*mut c_void, $type>(symbol($library, $name)?) }
    };
}

impl Device {
    /// Loads the library and opens its first device, with a CQ of 16 entries.
    ///
    /// # Errors
    /// The call that failed.
    pub(crate) fn open() -> Result<Self> {
        let name: *const c_char = c"libibverbs.so.1".as_ptr();
        // SAFETY: the name is NUL-terminated; the library's constructors are trusted as in any program linked
        // to it.
        let library = unsafe { libc::dlopen(name, libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if library.is_null() {
            return Err(BenchError::Os { what: "dlopen", message: "libibverbs.so.1".to_owned() });
        }
        let get_device_list = function!(library, c"ibv_get_device_list", GetDeviceList);
        let open_device = function!(library, c"ibv_open_device", OpenDevice);
        let query_gid = function!(library, c"ibv_query_gid", QueryGid);
        let alloc_pd = function!(library, c"ibv_alloc_pd", AllocPd);
        let create_cq = function!(library, c"ibv_create_cq", CreateCq);
        let create_qp = function!(library, c"ibv_create_qp", CreateQp);
        let modify_qp = function!(library, c"ibv_modify_qp", ModifyQp);
        let destroy_qp = function!(library, c"ibv_destroy_qp", DestroyQp);
        // SAFETY: each argument is what the call before gave, checked for null; gid is a whole ibv_gid.
        unsafe {
            let list = get_device_list(ptr::null_mut());
            if list.is_null() || (*list).is_null() {
                return Err(BenchError::os("ibv_get_device_list"));
            }
            let context = checked(open_device(*list), "ibv_open_device")?;
            let mut gid: abi::ibv_gid = std::mem::zeroed();
            if query_gid(context, 1, 0, &raw mut gid) != 0 {
                return Err(BenchError::os("ibv_query_gid"));
            }
            let pd = checked(alloc_pd(context), "ibv_alloc_pd")?;
            let cq = checked(create_cq(context, 16, ptr::null_mut(), ptr::null_mut(), 0), "ibv_create_cq")?;
            Ok(Self { pd, cq, gid, create_qp, modify_qp, destroy_qp })
        }
    }

    /// Creates an RC QP whose two queues hold `depth` requests of one element each.
    pub(crate) fn create_qp(&self, depth: u32) -> Result<Qp> {
        // SAFETY: all-zero is a valid ibv_qp_init_attr; the CQ and PD are this device's.
        unsafe {
            let mut init: abi::ibv_qp_init_attr = std::mem::zeroed();
            init.send_cq = self.cq;
            init.recv_cq = self.cq;
            init.cap.max_send_wr = depth;
            init.cap.max_recv_wr = depth;
            init.cap.max_send_sge = 1;
            init.cap.max_recv_sge = 1;
            init.qp_type = abi::IBV_QPT_RC;
            checked((self.create_qp)(self.pd, &raw mut init), "ibv_create_qp").map(Qp)
        }
    }

    /// Takes `qp` from RESET to RTS, connected to `peer` of the same device.
    pub(crate) fn connect(&self, qp: &Qp, peer: &Qp) -> Result<()> {
        // SAFETY: all-zero is a valid ibv_qp_attr.
        let mut attr: abi::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = abi::IBV_QPS_INIT;
        attr.port_num = 1;
        attr.qp_access_flags = abi::IBV_ACCESS_REMOTE_WRITE | abi::IBV_ACCESS_REMOTE_READ;
        self.modify(
            qp,
            &mut attr,
            abi::IBV_QP_STATE | abi::IBV_QP_PKEY_INDEX | abi::IBV_QP_PORT | abi::IBV_QP_ACCESS_FLAGS,
        )?;
        attr.qp_state = abi::IBV_QPS_RTR;
        attr.path_mtu = abi::IBV_MTU_1024;
        // SAFETY: a Qp holds a QP that ibv_create_qp gave and nobody has destroyed.
        attr.dest_qp_num = unsafe { (*peer.0).qp_num };
        attr.max_dest_rd_atomic = 1;
        attr.min_rnr_timer = 12;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.grh.dgid = self.gid;
        attr.ah_attr.grh.hop_limit = 1;
        self.modify(
            qp,
            &mut attr,
            abi::IBV_QP_STATE
                | abi::IBV_QP_AV
                | abi::IBV_QP_PATH_MTU
                | abi::IBV_QP_DEST_QPN
                | abi::IBV_QP_RQ_PSN
                | abi::IBV_QP_MAX_DEST_RD_ATOMIC
                | abi::IBV_QP_MIN_RNR_TIMER,
        )?;
        attr.qp_state = abi::IBV_QPS_RTS;
        attr.timeout = 14;
        attr.retry_cnt = 7;
        attr.rnr_retry = 7;
        attr.max_rd_atomic = 1;
        self.modify(
            qp,
            &mut attr,
            abi::IBV_QP_STATE
                | abi::IBV_QP_TIMEOUT
                | abi::IBV_QP_RETRY_CNT
                | abi::IBV_QP_RNR_RETRY
                | abi::IBV_QP_SQ_PSN
                | abi::IBV_QP_MAX_QP_RD_ATOMIC,
        )
    }

    /// Destroys a QP.
    pub(crate) fn destroy(&self, qp: Qp) -> Result<()> {
        // SAFETY: the QP is taken by value, so this is its only destruction.
        errno(unsafe { (self.destroy_qp)(qp.0) }, "ibv_destroy_qp")
    }

    fn modify(&self, qp: &Qp, attr: &mut abi::ibv_qp_attr, mask: abi::ibv_qp_attr_mask) -> Result<()> {
        let mask = c_int::try_from(mask).unwrap_or(0);
        // SAFETY: the QP lives (see connect) and attr is a whole ibv_qp_attr.
        errno(unsafe { (self.modify_qp)(qp.0, attr, mask) }, "ibv_modify_qp")
    }
}

fn checked<T>(pointer: *mut T, what: &'static str) -> Result<*mut T> {
    if pointer.is_null() { Err(BenchError::os(what)) } else { Ok(pointer) }
}

fn errno(code: c_int, what: &'static str) -> Result<()> {
    match code {
        0 => Ok(()),
        code => Err(BenchError::from_io(what, &std::io::Error::from_raw_os_error(code))),
    }
}
