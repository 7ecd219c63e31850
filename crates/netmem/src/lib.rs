//! Part of Netmem.
