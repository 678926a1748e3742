-- Wireshark dissector for 1RMA packets (docs/onerma.md, "Packets"; the layout is in
-- provider/onerma/src/wire.rs).
--
--   tshark -X lua_script:docs/onerma.lua -r file -Y onerma -V
--   Wireshark: put it into the folder of personal Lua plugins (Help > About Wireshark > Folders)
--
-- Packets are known by their UDP ports, 4795 to 4858. What is encrypted stays so: there is no key here.

local onerma = Proto("onerma", "1RMA (connection-free RDMA)")

local HOPS = { [1] = "Request", [2] = "Ask", [3] = "Data", [4] = "Done", [5] = "Fail" }
local OPS = { [1] = "READ", [2] = "WRITE", [3] = "REKEY" }
local STATUSES = {
	[0] = "OK", [1] = "REMOTE_AUTHENTICATION_FAILURE", [2] = "NACK", [3] = "TIMEOUT", [4] = "DISPATCH_TIMEOUT",
	[5] = "REMOTE_ACCESS", [6] = "LOCAL_ACCESS", [7] = "EXHAUSTED",
}
local CLASSES = { [0] = "high", [1] = "low" }
local VERSION, PREFIX, TAG, PORT, CARDS = 1, 16, 16, 4795, 64

local f = {
	version = ProtoField.uint8("onerma.version", "Version", base.DEC, nil, 0xf0),
	hop = ProtoField.uint8("onerma.hop", "Hop", base.DEC, HOPS, 0x0f),
	op = ProtoField.uint8("onerma.op", "Operation", base.DEC, OPS),
	status = ProtoField.uint8("onerma.status", "Status", base.DEC, STATUSES),
	class = ProtoField.uint8("onerma.class", "Class", base.DEC, CLASSES),
	sender = ProtoField.ipv4("onerma.sender", "Sender (of the initialisation vector)"),
	counter = ProtoField.uint64("onerma.counter", "Counter (of the initialisation vector)", base.HEX),
	from_index = ProtoField.uint32("onerma.from.index", "From: slot or transfer", base.DEC),
	from_generation = ProtoField.uint32("onerma.from.generation", "From: generation", base.DEC),
	to_index = ProtoField.uint32("onerma.to.index", "To: slot or transfer", base.DEC),
	to_generation = ProtoField.uint32("onerma.to.generation", "To: generation", base.DEC),
	pid = ProtoField.uint32("onerma.pid", "Process", base.DEC),
	region = ProtoField.uint32("onerma.region", "Region", base.HEX),
	region_offset = ProtoField.uint64("onerma.region_offset", "Offset in the region", base.DEC),
	size = ProtoField.uint32("onerma.size", "Bytes", base.DEC),
	timeout = ProtoField.uint32("onerma.timeout", "The initiator waits, ns", base.DEC),
	offset = ProtoField.uint32("onerma.offset", "Offset in the operation", base.DEC),
	data = ProtoField.bytes("onerma.encrypted", "Encrypted data"),
	tag = ProtoField.bytes("onerma.tag", "Tag"),
}
onerma.fields = f

local malformed = ProtoExpert.new("onerma.malformed", "No such packet", expert.group.MALFORMED,
	expert.severity.ERROR)
onerma.experts = { malformed }

-- What stands behind the prefix of each hop: fields and their lengths, in order.
local LAYOUTS = {
	[1] = {
		f.from_index, 4, f.from_generation, 4, f.pid, 4, f.region, 4, f.region_offset, 8, f.size, 4, f.timeout, 4,
	},
	[2] = { f.to_index, 4, f.to_generation, 4, f.from_index, 4, f.from_generation, 4, f.size, 4 },
	[3] = { f.to_index, 4, f.to_generation, 4, f.offset, 4 },
	[4] = { f.to_index, 4, f.to_generation, 4 },
	[5] = { f.to_index, 4, f.to_generation, 4 },
}

-- What a line says of a packet beside its kind.
local function told(hop, tvb)
	if hop == 1 then return string.format(" region 0x%x, %d bytes", tvb(28, 4):uint(), tvb(40, 4):uint()) end
	if hop == 2 then return string.format(", %d bytes", tvb(32, 4):uint()) end
	if hop == 3 then return string.format(" at %d", tvb(24, 4):uint()) end
	if hop == 5 then return " " .. (STATUSES[tvb(2, 1):uint()] or "?") end
	return ""
end

function onerma.dissector(tvb, pinfo, root)
	if tvb:len() < PREFIX + 8 + TAG then return 0 end
	local first = tvb(0, 1):uint()
	local hop = bit.band(first, 15)
	if bit.rshift(first, 4) ~= VERSION or not HOPS[hop] then return 0 end
	pinfo.cols.protocol = "1RMA"
	local tree = root:add(onerma, tvb())
	tree:add(f.version, tvb(0, 1))
	tree:add(f.hop, tvb(0, 1))
	tree:add(f.op, tvb(1, 1))
	tree:add(f.status, tvb(2, 1))
	tree:add(f.class, tvb(3, 1))
	tree:add(f.sender, tvb(4, 4))
	tree:add(f.counter, tvb(8, 8))
	local at, stop = PREFIX, tvb:len() - TAG
	local layout = LAYOUTS[hop]
	for i = 1, #layout, 2 do
		local field, len = layout[i], layout[i + 1]
		if at + len > stop then
			tree:add_proto_expert_info(malformed)
			return tvb:len()
		end
		tree:add(field, tvb(at, len))
		at = at + len
	end
	local what = (OPS[tvb(1, 1):uint()] or "?") .. " " .. HOPS[hop] .. told(hop, tvb)
	if at < stop then
		tree:add(f.data, tvb(at, stop - at))
		what = what .. string.format(", %d bytes", stop - at)
	end
	tree:add(f.tag, tvb(stop, TAG))
	pinfo.cols.info = what
	return tvb:len()
end

for card = 0, CARDS - 1 do
	DissectorTable.get("udp.port"):add(PORT + card, onerma)
end
