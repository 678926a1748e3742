-- Wireshark dissector for StaR packets (docs/wire.md, "StaR"; the paper's Fig. 7 and 8).
--
--   tshark -X lua_script:docs/star.lua -r file -Y star -V
--   Wireshark: put it into the folder of personal Lua plugins (Help > About Wireshark > Folders)
--
-- Packets are known by UDP ports 4793 and 4794, and on other ports, which ends may tell each other, by their
-- header's checksum. The messages by which ends settle their roles travel in RoCEv2 frames of op-code 0xc3;
-- they are shown beside what Wireshark says of those.

local star = Proto("star", "StaR (stateless RDMA)")

local PTYPES = {
	[1] = "WQEP", [2] = "EA", [3] = "RD", [4] = "RDA", [5] = "GD", [6] = "GDA", [7] = "CQEP", [8] = "WQEPS",
	[9] = "RDC", [10] = "RDAS", [11] = "RDCS", [12] = "SEVERAL", [13] = "ED",
}
local OPTS = { [0] = "SEND", [1] = "RECV", [2] = "WRITE", [3] = "READ" }
local CONTROLS = {
	[1] = "Offer", [2] = "Accept", [3] = "Confirm", [4] = "Plain", [5] = "Not yet", [6] = "Setup", [7] = "Rule",
	[8] = "Unrule", [9] = "Want", [10] = "Keep alive", [11] = "Bye", [12] = "Begin",
	[13] = "Begin with rules that are known",
	[14] = "Resend rules", [15] = "Change", [16] = "Quiescing", [17] = "Settled", [22] = "Rule query",
	[23] = "Rule sum", [24] = "Role message", [0xe1] = "Sealed",
}
local PREFERENCES = { [0] = "off", [1] = "auto", [2] = "stateless", [3] = "stateful" }
local OPCODES = {
	[0] = "RDMA_WRITE", [1] = "RDMA_WRITE_WITH_IMM", [2] = "SEND", [3] = "SEND_WITH_IMM", [4] = "RDMA_READ",
	[5] = "ATOMIC_CMP_AND_SWP", [6] = "ATOMIC_FETCH_AND_ADD", [7] = "LOCAL_INV", [8] = "BIND_MW",
	[9] = "SEND_WITH_INV",
	[14] = "FLUSH", [15] = "ATOMIC_WRITE", [62] = "RPC", [63] = "RPC_WRITE", [255] = "receive",
}
local STATUSES = {
	[0] = "success", [1] = "local length", [4] = "local protection", [5] = "flushed",
	[9] = "remote invalid request", [10] = "remote access", [11] = "remote operation", [12] = "retries exceeded",
	[13] = "RNR retries exceeded",
}
local HEADER, PREFIX, TOKEN, CRC = 20, 8, 16, 4

local f = {
	ptype = ProtoField.uint8("star.ptype", "Packet type", base.DEC, PTYPES, 0xf0),
	opt = ProtoField.uint8("star.opt", "Operation", base.DEC, OPTS, 0x0c),
	m = ProtoField.bool("star.m", "Control message", 8, nil, 0x02),
	a = ProtoField.bool("star.a", "Answer wanted", 8, nil, 0x01),
	qpn = ProtoField.uint24("star.qpn", "QPN", base.HEX),
	epoch_low = ProtoField.uint8("star.epoch_low", "Epoch, low byte", base.DEC),
	psn = ProtoField.uint24("star.psn", "PSN", base.DEC),
	addr = ProtoField.uint64("star.addr", "Address", base.HEX),
	len = ProtoField.uint16("star.len", "Length", base.DEC),
	checksum = ProtoField.uint16("star.checksum", "Checksum", base.HEX),
	prefix_qpn = ProtoField.uint32("star.sl_qpn", "QPN of SL (of the sender, in control messages)", base.HEX),
	epoch = ProtoField.uint32("star.epoch", "Epoch", base.HEX),
	slot_memory = ProtoField.uint64("star.slots", "Slot memory", base.HEX),
	slot_count = ProtoField.uint64("star.slots.count", "Slots, the gate's included", base.DEC),
	token = ProtoField.uint64("star.token", "Token", base.HEX),
	opcode = ProtoField.uint8("star.wqe.opcode", "Op-code", base.DEC, OPCODES),
	eager = ProtoField.bool("star.wqe.eager", "Its data follows", 8, nil, 0x01),
	wqe_flags = ProtoField.uint8("star.wqe.flags", "Flags", base.HEX),
	num_sge = ProtoField.uint8("star.wqe.num_sge", "SGEs", base.DEC),
	wqe_len = ProtoField.uint32("star.wqe.length", "Length", base.DEC),
	remote_addr = ProtoField.uint64("star.wqe.remote_addr", "Remote address", base.HEX),
	rkey = ProtoField.uint32("star.wqe.rkey", "rkey", base.HEX),
	imm = ProtoField.uint32("star.imm", "Immediate data or key", base.HEX),
	sge_addr = ProtoField.uint64("star.sge.addr", "SGE address", base.HEX),
	sge_len = ProtoField.uint32("star.sge.length", "SGE length", base.DEC),
	sge_lkey = ProtoField.uint32("star.sge.lkey", "SGE lkey", base.HEX),
	slot = ProtoField.uint64("star.slot", "Slot", base.HEX),
	status = ProtoField.uint8("star.cqe.status", "Status", base.DEC, STATUSES),
	wc_opcode = ProtoField.uint8("star.cqe.opcode", "Op-code", base.DEC),
	wc_flags = ProtoField.uint8("star.cqe.flags", "Flags", base.HEX),
	solicited = ProtoField.bool("star.cqe.solicited", "Solicited"),
	byte_len = ProtoField.uint32("star.cqe.byte_len", "Bytes", base.DEC),
	vendor_err = ProtoField.uint32("star.cqe.vendor_err", "Vendor error", base.HEX),
	turn = ProtoField.uint32("star.turn", "Number of the packet among those that have turns", base.DEC),
	turn_send = ProtoField.uint32("star.turn.send", "To a receive buffer", base.DEC),
	atomic_seq = ProtoField.uint32("star.atomic.seq", "Sequence of atomics", base.DEC),
	atomic_slots = ProtoField.uint8("star.atomic.slots", "Logarithm of the number of slots", base.DEC),
	operand = ProtoField.uint64("star.atomic.operand", "Operand", base.HEX),
	control = ProtoField.uint8("star.control", "Control message", base.DEC, CONTROLS),
	preference = ProtoField.uint8("star.preference", "Role preference", base.DEC, PREFERENCES),
	drained = ProtoField.bool("star.drained", "Nothing is under way"),
	is_star = ProtoField.bool("star.is_star", "The sender is an end of StaR"),
	round = ProtoField.uint16("star.round", "Round", base.DEC),
	from_incarnation = ProtoField.uint32("star.incarnation.from", "Incarnation of the sender", base.HEX),
	to_incarnation = ProtoField.uint32("star.incarnation.to", "Incarnation that it is for", base.HEX),
	role = ProtoField.uint8("star.role", "Role", base.DEC, PREFERENCES),
	stateful = ProtoField.uint32("star.stateful", "Connections that the card keeps", base.DEC),
	threshold = ProtoField.uint32("star.threshold", "Threshold", base.DEC),
	done_sends = ProtoField.uint32("star.done.sends", "Next that SL sends", base.DEC),
	done_recvs = ProtoField.uint32("star.done.recvs", "Next that SL receives", base.DEC),
	port_stateless = ProtoField.uint16("star.port.stateless", "UDP port of the stateless half", base.DEC),
	port_stateful = ProtoField.uint16("star.port.stateful", "UDP port of the stateful half", base.DEC),
	boot = ProtoField.uint64("star.boot", "Boot epoch of the card", base.HEX),
	pd = ProtoField.uint32("star.pd", "Protection domain", base.HEX),
	mtu = ProtoField.uint8("star.mtu", "Path MTU (enum ibv_mtu)", base.DEC),
	srq = ProtoField.bool("star.srq", "Shared receive queue"),
	rd_atomic = ProtoField.uint8("star.max_rd_atomic", "READs and atomics outstanding", base.DEC),
	rnr_retry = ProtoField.uint8("star.rnr_retry", "RNR retries", base.DEC),
	rnr_timer = ProtoField.uint8("star.min_rnr_timer", "RNR timer", base.DEC),
	sq_depth = ProtoField.uint32("star.sq_depth", "WQEs of the send queue", base.DEC),
	rq_depth = ProtoField.uint32("star.rq_depth", "WQEs of the receive queue", base.DEC),
	replay_slots = ProtoField.uint32("star.replay_slots", "Number of slots of atomics", base.DEC),
	access = ProtoField.uint32("star.access", "Rights", base.HEX),
	key = ProtoField.uint32("star.key", "Key", base.HEX),
	rule_qpn = ProtoField.uint32("star.rule.qpn", "QPN that may use it (0: all)", base.HEX),
	rule_addr = ProtoField.uint64("star.rule.addr", "Address", base.HEX),
	rule_len = ProtoField.uint64("star.rule.length", "Length", base.DEC),
	rule_iova = ProtoField.uint64("star.rule.iova", "Address in requests", base.HEX),
	rules = ProtoField.uint32("star.rules", "Rules that are known", base.DEC),
	rules_sum = ProtoField.uint64("star.rules_sum", "Their sum", base.HEX),
	upto = ProtoField.uint32("star.upto", "WQEs wanted before", base.DEC),
	record_queue = ProtoField.bool("star.record.recv", "Receive", 8, nil, 0x80),
	record_seq = ProtoField.uint24("star.record.seq", "Sequence", base.DEC),
	inline = ProtoField.bytes("star.inline", "Inline bytes"),
	record_recv = ProtoField.uint8("star.carried.queue", "Queue (1: receive)", base.DEC),
	carried = ProtoField.bytes("star.carried.data", "Data of the message"),
	version = ProtoField.uint8("star.version", "Version", base.DEC),
	data = ProtoField.bytes("star.data", "Data"),
	crc = ProtoField.uint32("star.crc", "CRC-32", base.HEX),
}
star.fields = f

local bad_checksum = ProtoExpert.new("star.checksum.bad", "Wrong checksum", expert.group.CHECKSUM,
	expert.severity.ERROR)
star.experts = { bad_checksum }

-- CRC-16/CCITT of a string, from `crc` on.
local function crc16(crc, bytes)
	for i = 1, #bytes do
		crc = bit.bxor(crc, bit.lshift(bytes:byte(i), 8))
		for _ = 1, 8 do
			local top = bit.band(crc, 0x8000) ~= 0
			crc = bit.band(bit.lshift(crc, 1), 0xffff)
			if top then crc = bit.bxor(crc, 0x1021) end
		end
	end
	return crc
end

local function raw(tvb, from, len) return tvb:range(from, len):raw() end

-- An address as 16 bytes.
local function address(field)
	local bytes = field.range:bytes():raw()
	if #bytes == 4 then return ("\0"):rep(10) .. "\255\255" .. bytes end
	return bytes
end

local ip_src, ip_dst = Field.new("ip.src"), Field.new("ip.dst")
local ip6_src, ip6_dst = Field.new("ipv6.src"), Field.new("ipv6.dst")

local function checksum(tvb, pinfo)
	local src, dst = ip_src() or ip6_src(), ip_dst() or ip6_dst()
	if not (src and dst) then return nil end
	local ports = string.char(
		bit.rshift(pinfo.src_port, 8), bit.band(pinfo.src_port, 255),
		bit.rshift(pinfo.dst_port, 8), bit.band(pinfo.dst_port, 255))
	local all = address(src) .. address(dst) .. ports .. raw(tvb, 0, 18) .. "\0\0"
	return crc16(0xffff, all)
end

local function wqe(data, tree)
	if data:len() < 48 then return "" end
	tree:add(f.opcode, data(0, 1))
	tree:add(f.wqe_flags, data(1, 1))
	tree:add(f.num_sge, data(2, 1))
	tree:add(f.wqe_len, data(4, 4))
	local code = data(0, 1):uint()
	if code ~= 255 then
		tree:add(f.remote_addr, data(8, 8))
		tree:add(f.operand, data(16, 8))
		tree:add(f.operand, data(24, 8))
		tree:add(f.rkey, data(32, 4))
		tree:add(f.imm, data(36, 4))
	end
	local count, at = data(2, 1):uint(), 48
	while count > 0 and at + 16 <= data:len() do
		tree:add(f.sge_addr, data(at, 8))
		tree:add(f.sge_len, data(at + 8, 4))
		tree:add(f.sge_lkey, data(at + 12, 4))
		count, at = count - 1, at + 16
	end
	if at < data:len() then tree:add(f.data, data(at)) end
	return " " .. (OPCODES[code] or "op-code " .. code) .. " " .. data(4, 4):uint() .. " bytes"
end

-- WQEs of both queues, one behind the other.
local function records(data, tree)
	local at, count = 0, 0
	while at + 12 <= data:len() do
		local recv = data(at, 1):uint() >= 128
		local code, sges = data(at + 4, 1):uint(), data(at + 6, 1):uint()
		local inline = bit.band(data(at + 5, 1):uint(), 8) ~= 0
		local length, from = data(at + 8, 4):uint(), at
		tree:add(f.record_queue, data(at, 1))
		tree:add(f.record_seq, data(at + 1, 3))
		tree:add(f.opcode, data(at + 4, 1))
		tree:add(f.wqe_flags, data(at + 5, 1))
		tree:add(f.num_sge, data(at + 6, 1))
		tree:add(f.eager, data(at + 7, 1))
		tree:add(f.wqe_len, data(at + 8, 4))
		at = at + 12
		if not recv and (code == 3 or code == 9) and at + 4 <= data:len() then
			tree:add(f.imm, data(at, 4))
			at = at + 4
		elseif not recv and code ~= 2 and at + 40 <= data:len() then
			tree:add(f.remote_addr, data(at, 8))
			tree:add(f.operand, data(at + 8, 8))
			tree:add(f.operand, data(at + 16, 8))
			tree:add(f.rkey, data(at + 24, 4))
			tree:add(f.imm, data(at + 28, 4))
			at = at + 40
		end
		while sges > 0 and at + 16 <= data:len() do
			tree:add(f.sge_addr, data(at, 8))
			tree:add(f.sge_len, data(at + 8, 4))
			tree:add(f.sge_lkey, data(at + 12, 4))
			sges, at = sges - 1, at + 16
		end
		if inline and not recv and length > 0 and at + length <= data:len() then
			tree:add(f.inline, data(at, length))
			at = at + length
		end
		count = count + 1
		if at <= from then break end
	end
	return " " .. count .. " WQEs"
end

local function completion(data, tree)
	if data:len() < 32 then return "" end
	tree:add(f.slot, data(0, 8))
	tree:add(f.status, data(8, 1))
	tree:add(f.wc_opcode, data(9, 1))
	tree:add(f.wc_flags, data(10, 1))
	tree:add(f.solicited, data(11, 1))
	tree:add(f.byte_len, data(12, 4))
	tree:add(f.imm, data(16, 4))
	tree:add(f.vendor_err, data(20, 4))
	local status = data(8, 1):uint()
	return " " .. (STATUSES[status] or "status " .. status)
end

-- The turn of data that has one; `shown`: what is before it.
local function turn(data, tree, shown)
	if data:len() < 16 then return "" end
	tree:add(f.slot, data(0, 8))
	tree:add(f.turn, data(8, 4))
	tree:add(f.turn_send, data(12, 4))
	if data:len() > 16 then tree:add(f.carried, data(16)) end
	return (shown or "") .. " turn " .. data(8, 4):uint() .. " " .. (data:len() - 16) .. " bytes"
end

-- A completion before the last data of its message, which may have a turn.
local function carried(data, tree, opt)
	if data:len() < 32 then return "" end
	tree:add(f.slot, data(0, 8))
	tree:add(f.record_recv, data(8, 1))
	tree:add(f.wc_opcode, data(9, 1))
	tree:add(f.wc_flags, data(10, 1))
	tree:add(f.solicited, data(11, 1))
	tree:add(f.byte_len, data(12, 4))
	tree:add(f.imm, data(16, 4))
	tree:add(f.record_seq, data(21, 3))
	local shown = " completion " .. data(21, 3):uint()
	if opt == 1 and data:len() > 32 then return turn(data(32), tree, shown) end
	if data:len() > 32 then tree:add(f.carried, data(32)) end
	return shown .. " " .. (data:len() - 32) .. " bytes"
end

-- Several of these, one behind the other.
local function bundled(data, tree, opt)
	local at, text = 0, ""
	while at + 12 + 32 <= data:len() do
		local len = 32 + data(at + 8, 4):uint()
		if at + 12 + len > data:len() then return text .. " (short)" end
		tree:add(f.addr, data(at, 8))
		text = text .. carried(data(at + 12, len):tvb(), tree, opt)
		at = at + 12 + len
	end
	return text
end

local function atomic(data, tree)
	if data:len() < 32 then return "" end
	tree:add(f.opcode, data(0, 1))
	tree:add(f.atomic_slots, data(1, 1))
	tree:add(f.atomic_seq, data(4, 4))
	tree:add(f.slot, data(8, 8))
	tree:add(f.operand, data(16, 8))
	tree:add(f.operand, data(24, 8))
	return " atomic " .. data(4, 4):uint()
end

-- A count of slots, which stands by itself; their memory, with what the count is shifted by; and the MAC.
local function token(count, rest, tree)
	local place = rest(0, 8):uint64()
	local shift = place:band(31):tonumber()
	tree:add(f.slot_memory, rest(0, 8), place - shift)
	tree:add(f.slot_count, count, UInt64(count:uint()):lshift(shift))
	tree:add(f.token, rest(8, 8))
end

-- What stands behind a control message's number: fields and their lengths, in order.
local LAYOUTS = {
	[1] = {
		f.preference, 1, f.stateful, 4, f.threshold, 4, f.port_stateless, 2, f.port_stateful, 2, f.boot, 8,
		f.version, 1,
	},
	[2] = { f.role, 1, f.port_stateless, 2, f.port_stateful, 2, f.boot, 8 },
	[3] = { f.role, 1 },
	[6] = {
		f.boot, 8, f.pd, 4, f.mtu, 1, f.srq, 1, f.rd_atomic, 1, f.rnr_retry, 1, f.rnr_timer, 1,
		f.sq_depth, 4, f.rq_depth, 4,
		TOKEN, 1 + TOKEN, f.replay_slots, 4, f.access, 4,
	},
	[7] = { f.key, 4, f.pd, 4, f.rule_qpn, 4, f.rule_addr, 8, f.rule_len, 8, f.rule_iova, 8, f.access, 4 },
	[8] = { f.key, 4 },
	[9] = { f.upto, 4 },
	[11] = { f.status, 1, f.done_recvs, 4 },
	[13] = { f.rules, 4, f.rules_sum, 8 },
	[15] = {
		f.round, 2, f.version, 1, f.is_star, 1, f.preference, 1, f.stateful, 4, f.threshold, 4,
		f.port_stateless, 2, f.port_stateful, 2, f.boot, 8,
	},
	[16] = {
		f.round, 2, f.role, 1, f.port_stateless, 2, f.port_stateful, 2, f.boot, 8, f.drained, 1, f.done_sends, 4,
		f.done_recvs, 4,
	},
	[17] = { f.round, 2, f.is_star, 1 },
	[24] = { f.from_incarnation, 4, f.to_incarnation, 4 },
}

local control
function control(data, tree)
	tree:add(f.control, data(0, 1))
	local code = data(0, 1):uint()
	local text, at = " " .. (CONTROLS[code] or "message " .. code), 1
	local layout = LAYOUTS[code] or {}
	for i = 1, #layout, 2 do
		local field, len = layout[i], layout[i + 1]
		if at + len > data:len() then return text .. " (short)" end
		if field == TOKEN then
			token(data(at, 1), data(at + 1, TOKEN), tree)
		else
			tree:add(field, data(at, len))
		end
		if field == f.preference or field == f.role then
			text = text .. " " .. (PREFERENCES[data(at, 1):uint()] or "?")
		end
		at = at + len
	end
	-- Two incarnations stand before the message itself.
	if code == 24 and at < data:len() then return control(data(at):tvb(), tree) end
	if at < data:len() then tree:add(f.data, data(at)) end
	return text
end

local function body(kind, opt, m, data, tree)
	if m then return control(data, tree) end
	if kind == 1 then return wqe(data, tree) end
	if kind == 8 then return records(data, tree) end
	if kind == 9 then return carried(data, tree, opt) end
	if kind == 11 then return bundled(data, tree, opt) end
	if kind == 7 then return completion(data, tree) end
	if kind == 5 and opt == 1 then return atomic(data, tree) end
	if kind == 3 and opt == 1 then return turn(data, tree) end
	tree:add(f.data, data())
	return ""
end

-- A packet without its CRC, which begins at `stop`; `right`: its checksum, if it has one.
local function packet(tvb, stop, tree, right)
	local first = tvb(0, 1):uint()
	local kind, opt = bit.rshift(first, 4), bit.band(bit.rshift(first, 2), 3)
	local m = bit.band(first, 2) ~= 0
	for _, field in ipairs({ f.ptype, f.opt, f.m, f.a }) do tree:add(field, tvb(0, 1)) end
	tree:add(f.qpn, tvb(1, 3))
	tree:add(f.epoch_low, tvb(4, 1))
	tree:add(f.psn, tvb(5, 3))
	tree:add(f.addr, tvb(8, 8))
	tree:add(f.len, tvb(16, 2))
	local item = tree:add(f.checksum, tvb(18, 2))
	if right and right ~= tvb(18, 2):uint() then item:add_proto_expert_info(bad_checksum) end

	local text = PTYPES[kind] .. " " .. OPTS[opt] .. (m and " control" or "")
	local at = HEADER
	-- An EA has no data, so that its length says to which half it goes.
	local to_stateless = kind == 3 or kind == 5 or kind == 7 or kind == 9 or kind == 11
		or (kind == 2 and stop > HEADER)
	if (m or to_stateless) and at + PREFIX <= stop then
		tree:add(f.prefix_qpn, tvb(at + 1, 3))
		tree:add(f.epoch, tvb(at + 4, 4))
		at = at + PREFIX
	end
	if to_stateless and not m and at + TOKEN <= stop then
		token(tvb(at - PREFIX, 1), tvb(at, TOKEN), tree)
		at = at + TOKEN
	end
	text = text .. string.format(" QPN 0x%06x PSN %d", tvb(1, 3):uint(), tvb(5, 3):uint())
	if at < stop then
		text = text .. body(kind, opt, m, tvb(at, stop - at):tvb(), tree)
	elseif kind == 6 and opt == 1 then
		-- The atomic before it has not been done.
		text = text .. " early"
	end
	return text
end

-- Packets of a frame of several, one behind the other.
local function several(tvb, stop, tree, right)
	tree:add(f.ptype, tvb(0, 1))
	tree:add(f.len, tvb(16, 2))
	local item = tree:add(f.checksum, tvb(18, 2))
	if right and right ~= tvb(18, 2):uint() then item:add_proto_expert_info(bad_checksum) end
	local at, text = HEADER, ""
	while at + 2 <= stop do
		local len = tvb(at, 2):uint()
		if len < HEADER or at + 2 + len > stop then break end
		local one = tvb(at + 2, len):tvb()
		if not PTYPES[bit.rshift(one(0, 1):uint(), 4)] then break end
		text = text .. (text == "" and "" or ", ") .. packet(one, len, tree:add(star, one()))
		at = at + 2 + len
	end
	return text
end

function star.dissector(tvb, pinfo, root)
	if tvb:len() < HEADER + CRC then return 0 end
	local kind = bit.rshift(tvb(0, 1):uint(), 4)
	if not PTYPES[kind] then return 0 end
	pinfo.cols.protocol = "StaR"
	local tree, stop = root:add(star, tvb()), tvb:len() - CRC
	local dissect = kind == 12 and several or packet
	local text = dissect(tvb, stop, tree, checksum(tvb, pinfo))
	tree:add_le(f.crc, tvb(stop, CRC))
	pinfo.cols.info = text
	return tvb:len()
end

local function heuristic(tvb, pinfo, root)
	if tvb:len() < HEADER + CRC or not PTYPES[bit.rshift(tvb(0, 1):uint(), 4)] then return false end
	if checksum(tvb, pinfo) ~= tvb(18, 2):uint() then return false end
	star.dissector(tvb, pinfo, root)
	return true
end

local by_port = DissectorTable.get("udp.port")
by_port:add(4793, star)
by_port:add(4794, star)
star:register_heuristic("udp", heuristic)

-- BTH, with the number of bytes that pad, DETH with the sender's QPN, message, padding, ICRC.
local BTH, DETH, ROLES = 12, 8, 0xc3
local roles = Proto("star_roles", "StaR (settling of roles)")
local opcode, udp_length = Field.new("infiniband.bth.opcode"), Field.new("udp.length")

function roles.dissector(tvb, pinfo, root)
	local field, length = opcode(), udp_length()
	if not field or not length or field.value ~= ROLES then return end
	local at = field.offset
	local pad = bit.band(bit.rshift(tvb(at + 1, 1):uint(), 4), 3)
	local stop = at + length.value - 8 - CRC - pad
	if stop <= at + BTH + DETH or stop > tvb:len() then return end
	local tree = root:add(roles, tvb(at + BTH, stop - at - BTH))
	tree:add(f.qpn, tvb(at + 5, 3))
	tree:add(f.prefix_qpn, tvb(at + BTH + 5, 3))
	local from = at + BTH + DETH
	pinfo.cols.protocol = "StaR"
	local text = control(tvb(from, stop - from):tvb(), tree)
	pinfo.cols.info = string.format("Roles QPN 0x%06x", tvb(at + 5, 3):uint()) .. text
end

register_postdissector(roles)
