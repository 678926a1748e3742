//! Counts and adds up the values of a column that are at least so large, where the column lies.
//!
//! Parameters, 24 bytes: address 8, key 4, bytes of the column 4 (values of 8 bytes), least value 8. The
//! answer: how many 8, and their sum 8. ../../filter.c is the same in C.
//!
//!     starverbs kernel build filter

use starverbs_sdk::{Code, Input, Kernel, KernelRun, Poll, RegionRange, export};

const PIECE: u32 = 4096;
/// Registers: bytes that were asked for, how many values, their sum.
const AT: usize = 0;
const COUNT: usize = 1;
const SUM: usize = 2;

/// The kernel.
#[derive(Default)]
struct Filter;

struct Params {
    va: u64,
    key: u32,
    len: u32,
    least: u64,
}

fn params(run: &KernelRun) -> Option<Params> {
    let whole = run.bytes().len() == 24;
    let (va, key, len, least) =
        (run.param_u64(0)?, run.param_u32(8)?, run.param_u32(12)?, run.param_u64(16)?);
    (whole && len % 8 == 0).then_some(Params { va, key, len, least })
}

/// Asks for the next piece. `None`: there is none.
fn fetch(run: &mut KernelRun, params: &Params) -> Option<()> {
    let at = run.regs[AT];
    let len = (params.len - at as u32).min(PIECE);
    run.regs[AT] += u64::from(len);
    (len > 0 && run.read(RegionRange { key: params.key, len, va: params.va + at })).then_some(())
}

impl Kernel for Filter {
    fn start(&mut self, run: &mut KernelRun, input: Input) -> Result<(), Code> {
        let params = params(run).filter(|_| input == Input::Params).ok_or(Code::BadParam)?;
        fetch(run, &params);
        Ok(())
    }

    fn step(&mut self, run: &mut KernelRun) -> Poll {
        let Some(params) = params(run) else { return Poll::Ready(Code::BadParam) };
        let [mut count, mut sum] = [run.regs[COUNT], run.regs[SUM]];
        for value in run.read_data().chunks_exact(8) {
            let value = u64::from_le_bytes(value.try_into().unwrap_or_default());
            if value >= params.least {
                count += 1;
                sum = sum.wrapping_add(value);
            }
        }
        (run.regs[COUNT], run.regs[SUM]) = (count, sum);
        if fetch(run, &params).is_some() {
            return Poll::Pending;
        }
        let fits = run.reply(&count.to_le_bytes()) && run.reply(&sum.to_le_bytes());
        Poll::Ready(if fits { Code::Ok } else { Code::Overflow })
    }
}

export!(Filter);
