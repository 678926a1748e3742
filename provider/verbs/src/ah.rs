//! Address handles: where UD messages go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use starverbs_core::{Av, AvId, Gid};

use crate::context::Context;
use crate::device::Command;
use crate::error::{Result, VerbsError};
use crate::pd::Pd;

/// `struct ibv_ah_attr`. Of no meaning on RoCE, kept for queries: `dlid`, `static_rate`, `src_path_bits`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AhAttr {
    /// GID of the destination, or of the multicast group
    pub dgid: Gid,
    /// Index of the source's GID in the port's table
    pub sgid_index: u8,
    /// IP hop limit, or TTL
    pub hop_limit: u8,
    /// IP traffic class, or TOS
    pub traffic_class: u8,
    /// Flow label, 20 bits
    pub flow_label: u32,
    /// Service level, 4 bits
    pub sl: u8,
    /// Whether there is a GRH; RoCE needs one
    pub is_global: bool,
    /// Number of the port, from 1
    pub port: u8,
    /// LID of the destination
    pub dlid: u16,
    /// `enum ibv_rate`
    pub static_rate: u8,
    /// Low bits of the source's LID
    pub src_path_bits: u8,
}

impl AhAttr {
    /// As the card wants it.
    ///
    /// # Errors
    /// EINVAL: no GRH (RoCE has no other addresses), no such port or GID index, or source and
    /// destination of different IP versions.
    pub(crate) fn resolve(&self, ctx: &Context) -> Result<Av> {
        if !self.is_global {
            return Err(VerbsError::Invalid("RoCE needs a GRH"));
        }
        let sgid = ctx
            .query_gid(self.port, u32::from(self.sgid_index))
            .map_err(|_| VerbsError::Invalid("port or GID index"))?
            .gid;
        if sgid.ipv4().is_some() != self.dgid.ipv4().is_some() {
            return Err(VerbsError::Invalid("source and destination GID of different IP versions"));
        }
        Ok(Av {
            dgid: self.dgid,
            sgid,
            sgid_index: self.sgid_index,
            hop_limit: self.hop_limit,
            traffic_class: self.traffic_class,
            sl: self.sl,
            flow_label: self.flow_label & 0xf_ffff,
            dlid: self.dlid,
            static_rate: self.static_rate,
            src_path_bits: self.src_path_bits,
        })
    }

    /// As a query gives it.
    pub(crate) fn from_av(av: &Av) -> Self {
        AhAttr {
            dgid: av.dgid,
            sgid_index: av.sgid_index,
            hop_limit: av.hop_limit,
            traffic_class: av.traffic_class,
            flow_label: av.flow_label,
            sl: av.sl,
            is_global: true,
            port: 1,
            dlid: av.dlid,
            static_rate: av.static_rate,
            src_path_bits: av.src_path_bits,
        }
    }
}

/// An address handle. Clones are the same handle.
#[derive(Clone)]
pub struct Ah(Arc<AhInner>);

struct AhInner {
    pd: Pd,
    id: AvId,
    gone: AtomicBool,
}

impl Ah {
    /// `ibv_create_ah`: makes an address handle.
    ///
    /// # Errors
    /// EINVAL: attributes that no address on this port has; ENOMEM; EIO in a forked child.
    pub fn create(pd: &Pd, attr: &AhAttr) -> Result<Ah> {
        let ctx = pd.context();
        let device = ctx.device()?;
        let av = attr.resolve(ctx)?;
        let id = AvId(device.control(Command::CreateAh { pd: pd.id(), av })?.number()?);
        Ok(Ah(Arc::new(AhInner { pd: pd.clone(), id, gone: AtomicBool::new(false) })))
    }

    /// Its handle on the card, for [`crate::SendWr::ah`].
    #[inline]
    pub fn id(&self) -> AvId {
        self.0.id
    }

    /// `ibv_destroy_ah`: ends an address handle.
    ///
    /// # Errors
    /// EINVAL when it is gone already; EIO in a forked child.
    pub fn destroy(&self) -> Result<()> {
        let device = self.0.pd.context().device()?;
        if self.0.gone.swap(true, Ordering::AcqRel) {
            return Err(VerbsError::Invalid("address handle is gone"));
        }
        device.control(Command::DestroyAh { ah: self.0.id }).map(|_| ())
    }
}

impl Drop for AhInner {
    fn drop(&mut self) {
        if !*self.gone.get_mut()
            && let Some(device) = self.pd.context().device_if_ours()
        {
            let _ = device.control(Command::DestroyAh { ah: self.id });
        }
    }
}
