//! How a libc call is exported, of this library and of the one that shares allocations.

/// Exports libc calls: several names in brackets have one body.
macro_rules! interpose {
    ($(#[doc = $doc:literal] [$($name:ident),+] $args:tt -> $result:ty $body:block)+) => {
        $($(interpose! { @one $doc $name $args -> $result $body })+)+
    };
    (@one $doc:literal $name:ident ($($arg:ident: $type:ty),* $(,)?) -> $result:ty $body:block) => {
        #[doc = $doc]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[cfg_attr(test, allow(dead_code))]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> $result {
            // SAFETY: libc's terms, which the caller keeps.
            unsafe { $body }
        }
    };
}

pub(crate) use interpose;
