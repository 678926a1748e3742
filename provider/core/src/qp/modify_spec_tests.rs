//! The table of transitions against the specification, written down a second time, from it and by hand.
//!
//! Source: the tables of man ibv_modify_qp(3) for what is required, and IBTA vol. 1, 11.2.5.2 with annex A14
//! (XRC) for what is optional and for SQD and SQE. Words are those of `enum ibv_qp_attr_mask`. Two things
//! differ from there, on purpose: alternate paths are nowhere (the device reports that it has none), and an
//! end of an extended connection may be given what only the other end has.

use std::string::String;

use super::*;

type Transition = (&'static str, &'static str, &'static str, &'static str, &'static str);

/// Types, from, to, required, optional.
const SPEC: &[Transition] = &[
    ("rc uc xs xr", "reset", "init", "pkey port access", ""),
    ("ud", "reset", "init", "pkey port qkey", ""),
    ("rc uc xs xr", "init", "init", "", "pkey port access"),
    ("ud", "init", "init", "", "pkey port qkey"),
    ("rc xr", "init", "rtr", "av mtu dest rq_psn max_dest_rd min_rnr", "access pkey"),
    ("uc", "init", "rtr", "av mtu dest rq_psn", "access pkey"),
    ("xs", "init", "rtr", "av mtu dest rq_psn", "access pkey max_dest_rd min_rnr"),
    ("ud", "init", "rtr", "", "pkey qkey"),
    ("rc", "rtr", "rts", "sq_psn timeout retry rnr max_rd", "cur access min_rnr mig"),
    ("xs", "rtr", "rts", "sq_psn timeout retry rnr max_rd", "cur access mig"),
    ("xr", "rtr", "rts", "sq_psn timeout", "cur access min_rnr mig retry rnr max_rd"),
    ("uc", "rtr", "rts", "sq_psn", "cur access mig"),
    ("ud", "rtr", "rts", "sq_psn", "cur qkey"),
    ("rc xs xr", "rts", "rts", "", "cur access min_rnr mig"),
    ("uc", "rts", "rts", "", "cur access mig"),
    ("ud", "rts", "rts", "", "cur qkey"),
    ("rc uc ud xs xr", "rts", "sqd", "", "notify"),
    ("rc xs xr", "sqd", "rts", "", "cur access min_rnr mig"),
    ("uc", "sqd", "rts", "", "cur access mig"),
    ("ud", "sqd", "rts", "", "cur qkey"),
    ("rc xs xr", "sqd", "sqd", "", "port av timeout retry rnr max_rd max_dest_rd access pkey min_rnr mig"),
    ("uc", "sqd", "sqd", "", "av access pkey mig"),
    ("ud", "sqd", "sqd", "", "pkey qkey"),
    ("uc", "sqe", "rts", "", "cur access"),
    ("ud", "sqe", "rts", "", "cur qkey"),
];

const TYPES: [(&str, QpType); 5] = [("rc", Rc), ("uc", Uc), ("ud", Ud), ("xs", XrcSend), ("xr", XrcRecv)];
const STATES: [(&str, QpState); 7] =
    [("reset", Reset), ("init", Init), ("rtr", Rtr), ("rts", Rts), ("sqd", Sqd), ("sqe", Sqe), ("err", Err)];

fn mask(words: &str) -> M {
    let bit = |word| match word {
        "cur" => M::CUR_STATE,
        "notify" => M::EN_SQD_ASYNC_NOTIFY,
        "access" => M::ACCESS_FLAGS,
        "pkey" => M::PKEY_INDEX,
        "port" => M::PORT,
        "qkey" => M::QKEY,
        "av" => M::AV,
        "mtu" => M::PATH_MTU,
        "timeout" => M::TIMEOUT,
        "retry" => M::RETRY_CNT,
        "rnr" => M::RNR_RETRY,
        "rq_psn" => M::RQ_PSN,
        "max_rd" => M::MAX_QP_RD_ATOMIC,
        "min_rnr" => M::MIN_RNR_TIMER,
        "sq_psn" => M::SQ_PSN,
        "max_dest_rd" => M::MAX_DEST_RD_ATOMIC,
        "mig" => M::PATH_MIG_STATE,
        "dest" => M::DEST_QPN,
        other => panic!("{other}"),
    };
    words.split_whitespace().fold(M::empty(), |mask, word| mask | bit(word))
}

/// Required and optional attributes, or `None` where there is no way.
fn spec(qp_type: &str, from: &str, to: &str) -> Option<(M, M)> {
    if to == "reset" || to == "err" {
        return Some((M::empty(), M::empty()));
    }
    let mut rows =
        SPEC.iter().filter(|row| row.0.split(' ').any(|t| t == qp_type) && row.1 == from && row.2 == to);
    let row = rows.next()?;
    assert!(rows.next().is_none(), "{row:?} stands twice");
    Some((mask(row.3), mask(row.4)))
}

/// Every transition of every transport, with every attribute added to what is required and taken away from
/// it.
#[test]
fn every_transition_with_every_attribute() {
    let mut wrong = String::new();
    let mut looked_at = 0;
    for (type_name, qp_type) in TYPES {
        for (from_name, from) in STATES {
            for (to_name, to) in STATES {
                let rule = spec(type_name, from_name, to_name);
                let (required, optional) = rule.unwrap_or_default();
                let mut expect = |mask: M, good: bool| {
                    looked_at += 1;
                    if check(qp_type, from, to, mask).is_ok() != good {
                        wrong += &std::format!("{type_name} {from_name}>{to_name} {mask:?}: not {good}\n");
                    }
                };
                let least = M::STATE | required;
                expect(least, rule.is_some());
                expect(least | optional, rule.is_some());
                for bit in M::all().iter().filter(|bit| *bit != M::STATE) {
                    let allowed = (required | optional).contains(bit);
                    expect(least | bit, rule.is_some() && allowed);
                    expect(least | optional | bit, rule.is_some() && allowed);
                    expect((least | optional) - bit, rule.is_some() && !required.contains(bit));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
    assert_eq!(looked_at, 5 * 7 * 7 * (2 + 3 * 21));
}
