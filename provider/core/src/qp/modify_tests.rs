use std::string::String;
use std::vec::Vec;

use super::*;
use crate::types::{Av, Psn};

const INVALID: Result<(), NicError> = Result::Err(NicError::Invalid);
const STATES: [QpState; 7] = [Reset, Init, Rtr, Rts, Sqd, Sqe, Err];

fn names(mask: M) -> String {
    let all: Vec<_> = mask.iter_names().map(|(n, _)| n).collect();
    all.join(" ")
}

/// All transitions as text: a change to the table shows as a difference here. The required columns
/// are the tables of man ibv_modify_qp(3), the others IBTA vol. 1, 11.2.5.2.
#[test]
fn snapshot_of_all_transitions() {
    let mut text = String::new();
    for qp_type in [Rc, Uc, Ud] {
        for from in STATES {
            for to in STATES {
                if let Some(r) = transition(qp_type, from, to) {
                    let line = std::format!(
                        "{qp_type:?} {from:?}>{to:?} | {} | {}",
                        names(r.required),
                        names(r.optional)
                    );
                    text.push_str(line.trim_end_matches([' ', '|']));
                    text.push('\n');
                }
            }
        }
    }
    assert_eq!(text, include_str!("modify_matrix.txt"), "\n{text}");
}

/// With exactly the required attributes each transition works; without any one of them it does not;
/// with one that is neither required nor optional it does not.
#[test]
fn required_and_optional_hold_bit_by_bit() {
    for qp_type in [Rc, Uc, Ud] {
        for (from, to) in STATES.iter().flat_map(|f| STATES.iter().map(move |t| (*f, *t))) {
            let Some(r) = transition(qp_type, from, to) else {
                assert_eq!(check(qp_type, from, to, M::STATE), INVALID);
                assert_eq!(check(qp_type, from, to, M::all()), INVALID);
                continue;
            };
            let least = M::STATE | r.required;
            assert_eq!(check(qp_type, from, to, least), Ok(()), "{r:?}");
            assert_eq!(check(qp_type, from, to, least | r.optional), Ok(()), "{r:?}");
            for bit in M::all().iter().filter(|b| *b != M::STATE) {
                let with = check(qp_type, from, to, least | bit).is_ok();
                assert_eq!(with, (r.required | r.optional).contains(bit), "{r:?} with {bit:?}");
                let without = check(qp_type, from, to, least - bit).is_ok();
                assert_eq!(without, !r.required.contains(bit), "{r:?} without {bit:?}");
            }
        }
    }
}

#[test]
fn no_transition_stands_twice() {
    for (i, a) in RULES.iter().enumerate() {
        assert!(!RULES[i + 1..].iter().any(|b| (a.qp_type, a.from, a.to) == (b.qp_type, b.from, b.to)));
        assert!(!a.required.intersects(a.optional) && !a.required.contains(M::STATE));
    }
}

#[test]
fn values_at_their_limits() {
    let top = QpAttr {
        port_num: 1,
        pkey_index: 0,
        timeout: 31,
        retry_cnt: 7,
        rnr_retry: 7,
        min_rnr_timer: 31,
        dest_qpn: QPN_MASK,
        max_rd_atomic: 128,
        max_dest_rd_atomic: 128,
        rq_psn: Psn::new(QPN_MASK),
        av: Av { sl: 15, flow_label: 0xf_ffff, ..Av::default() },
        ..QpAttr::default()
    };
    let all = M::all() - (M::ALT_PATH | M::CAP | M::RATE_LIMIT);
    assert_eq!(check_values(&top, all, 128), Ok(()));
    type Spoil = (M, fn(&mut QpAttr));
    let spoils: [Spoil; 14] = [
        (M::PORT, |a| a.port_num = 2),
        (M::PORT, |a| a.port_num = 0),
        (M::PKEY_INDEX, |a| a.pkey_index = 1),
        (M::TIMEOUT, |a| a.timeout = 32),
        (M::RETRY_CNT, |a| a.retry_cnt = 8),
        (M::RNR_RETRY, |a| a.rnr_retry = 8),
        (M::MIN_RNR_TIMER, |a| a.min_rnr_timer = 32),
        (M::DEST_QPN, |a| a.dest_qpn = QPN_MASK + 1),
        (M::MAX_QP_RD_ATOMIC, |a| a.max_rd_atomic = 129),
        (M::MAX_DEST_RD_ATOMIC, |a| a.max_dest_rd_atomic = 129),
        (M::AV, |a| a.av.sl = 16),
        (M::AV, |a| a.av.flow_label = 1 << 20),
        (M::PATH_MIG_STATE, |a| a.path_mig = PathMig::Armed),
        (M::PATH_MIG_STATE, |a| a.path_mig = PathMig::Rearm),
    ];
    for (bit, spoil) in spoils {
        let mut bad = top;
        spoil(&mut bad);
        assert_eq!(check_values(&bad, bit, 128), INVALID, "{bit:?}");
        assert_eq!(check_values(&bad, all - bit, 128), Ok(()), "{bit:?} not given");
    }
    for bit in [M::ALT_PATH, M::CAP, M::RATE_LIMIT] {
        assert_eq!(check_values(&top, bit, 128), INVALID, "{bit:?}");
    }
}
