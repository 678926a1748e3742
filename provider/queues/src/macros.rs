//! How the numbers and structs of a contract are written down, so that C's can be compared with them.

/// Constants of a contract, with their names in C.
macro_rules! constants {
    ($($(#[doc = $doc:literal])+ $c:literal $name:ident: $type:ty = $value:expr;)+) => {
        $($(#[doc = $doc])+ pub const $name: $type = $value;)+
        /// Every constant by its name in C.
        pub const CONSTANTS: &[(&str, u64)] = &[$(($c, $name as u64)),+];
    };
}

/// A struct as it lies in memory: any bytes are a value of it.
macro_rules! plain {
    ($($(#[doc = $about:literal])+ $c:literal $name:ident {
        $($(#[doc = $doc:literal])+ $field:ident: $type:ty,)+
    })+) => {
        $($(#[doc = $about])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { $($(#[doc = $doc])+ pub $field: $type,)+ })+

        /// Every struct: its name in C, its size, and its fields with their offsets.
        pub const STRUCTS: &[(&str, usize, &[(&str, usize)])] = &[
            $(($c, size_of::<$name>(), &[$((stringify!($field), core::mem::offset_of!($name, $field)),)+]),)+
        ];
    };
}
