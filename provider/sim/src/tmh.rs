//! Messages with tags as a program writes them (rdma-core, `infiniband/tm_types.h`), by hand: the card's own
//! headers are what is looked at.

/// Nothing that could match.
pub const NO_TAG: u8 = 0;
/// Where the data is, at the sender.
pub const RENDEZVOUS: u8 = 1;
/// The data of a rendezvous was fetched.
pub const FIN: u8 = 2;
/// The data itself.
pub const EAGER: u8 = 3;

/// A message's bytes: `struct ibv_tmh`, and behind it the data, or `struct ibv_rvh` for a rendezvous whose
/// data is at `place`, an address and a key.
pub fn message(op: u8, app_ctx: u32, tag: u64, data: &[u8], place: Option<(u64, u32)>) -> Vec<u8> {
    let mut bytes = vec![op, 0, 0, 0];
    bytes.extend(app_ctx.to_be_bytes());
    bytes.extend(tag.to_be_bytes());
    if let Some((addr, rkey)) = place {
        bytes.extend(addr.to_be_bytes());
        bytes.extend(rkey.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
    } else {
        bytes.extend(data);
    }
    bytes
}
