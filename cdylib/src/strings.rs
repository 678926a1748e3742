//! The words for statuses, events, node types and port states that programs print.
//!
//! Owns tables of static C strings. It must not know any object.

use core::ffi::{CStr, c_char, c_int};

const UNKNOWN: &CStr = c"unknown";

fn word(table: &[&'static CStr], index: c_int) -> *const c_char {
    usize::try_from(index).ok().and_then(|i| table.get(i)).unwrap_or(&UNKNOWN).as_ptr()
}

/// ibv_wc_status_str(3): the meaning of a completion status.
pub(crate) extern "C" fn wc_status_str(status: c_int) -> *const c_char {
    word(
        &[
            c"success",
            c"local length error",
            c"local QP operation error",
            c"local EE context operation error",
            c"local protection error",
            c"Work Request Flushed Error",
            c"memory management operation error",
            c"bad response error",
            c"local access error",
            c"remote invalid request error",
            c"remote access error",
            c"remote operation error",
            c"transport retry counter exceeded",
            c"RNR retry counter exceeded",
            c"local RDD violation error",
            c"remote invalid RD request",
            c"aborted error",
            c"invalid EE context number",
            c"invalid EE context state",
            c"fatal error",
            c"response timeout error",
            c"general error",
            c"TM error",
            c"TM software rendezvous",
        ],
        status,
    )
}

/// ibv_event_type_str(3): the meaning of an async event's type.
pub(crate) extern "C" fn event_type_str(event: c_int) -> *const c_char {
    word(
        &[
            c"CQ error",
            c"local work queue catastrophic error",
            c"invalid request local work queue error",
            c"local access violation work queue error",
            c"communication established",
            c"send queue drained",
            c"path migrated",
            c"path migration request error",
            c"local catastrophic error",
            c"port active",
            c"port error",
            c"LID change",
            c"P_Key change",
            c"SM change",
            c"SRQ catastrophic error",
            c"SRQ limit reached",
            c"last WQE reached",
            c"client reregistration",
            c"GID table change",
            c"WQ fatal",
            c"Device link speed change",
        ],
        event,
    )
}

/// ibv_node_type_str(3): the meaning of a device's node type.
pub(crate) extern "C" fn node_type_str(node_type: c_int) -> *const c_char {
    word(
        &[
            UNKNOWN,
            c"InfiniBand channel adapter",
            c"InfiniBand switch",
            c"InfiniBand router",
            c"iWARP NIC",
            c"usNIC",
            c"usNIC UDP",
            c"unspecified",
        ],
        node_type,
    )
}

/// ibv_port_state_str(3): the meaning of a port's state.
pub(crate) extern "C" fn port_state_str(state: c_int) -> *const c_char {
    word(&[c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer"], state)
}

/// ibv_wr_opcode_str: the name of a work request's operation.
pub(crate) extern "C" fn wr_opcode_str(opcode: c_int) -> *const c_char {
    word(
        &[
            c"rdma-write",
            c"rdma-write-with-imm",
            c"send",
            c"send-with-imm",
            c"rdma-read",
            c"atomic-cmp-and-swp",
            c"atomic-fetch-and-add",
            c"local-inv",
            c"bind-mw",
            c"send-with-inv",
            c"tso",
            c"driver1",
            UNKNOWN,
            UNKNOWN,
            c"flush",
            c"atomic-write",
        ],
        opcode,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(p: *const c_char) -> &'static str {
        // SAFETY: the functions under test return pointers to static, NUL-terminated strings.
        unsafe { CStr::from_ptr(p) }.to_str().unwrap_or("not UTF-8")
    }

    #[test]
    fn known_values_have_words_and_others_are_unknown() {
        assert_eq!(text(wc_status_str(12)), "transport retry counter exceeded");
        assert_eq!(text(event_type_str(18)), "GID table change");
        assert_eq!(text(node_type_str(1)), "InfiniBand channel adapter");
        assert_eq!(text(port_state_str(4)), "active");
        assert_eq!(text(wr_opcode_str(15)), "atomic-write");
        for odd in [-1, c_int::MIN, 24, c_int::MAX] {
            assert_eq!(text(wc_status_str(odd)), "unknown");
            assert_eq!(text(event_type_str(odd)), "unknown");
            assert_eq!(text(node_type_str(odd)), "unknown");
            assert_eq!(text(port_state_str(odd)), "unknown");
            assert_eq!(text(wr_opcode_str(odd)), "unknown");
        }
    }
}
