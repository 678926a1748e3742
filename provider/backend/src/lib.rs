//! Where a card touches the world: UDP, fault injection, capture
