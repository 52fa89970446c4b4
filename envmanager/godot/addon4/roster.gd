extends RefCounted
## Who plays: the agents of each behavior, and their rows in the frames.
##
## User code is called from here. After a script error it returns null, so nothing it returns is trusted: what is wrong
## becomes a fault, and the trainer gets that instead of the steps.

const Wire := preload("res://addons/envmanager/wire.gd")
const Group := preload("res://addons/envmanager/group.gd")
const Policy := preload("res://addons/envmanager/policy.gd")
const SAME := 1
const SOME_ENDED := 2
const ALL_ACT := 4
const ACTING := 4
const TICKS_ALONE := 4  # per action, when nobody trains and no policy says how many its training had
const TWO_RHYTHMS := "a policy was trained with %d ticks per action and another with %d; in one game all must have the same"

var groups: Array[Group] = []
var faults: Array = []
var is_closed := false  # the specs are with the trainer
var with_infos := false
var training = null  # what the arena declares
var _policies := {}  # path -> Policy; agents with the same path share it
var _infos := {}  # of the frame that is being made
var _is_looking := false


## The group of an agent; null and a fault when it fits none.
func group_of(agent: Node) -> Group:
	for group in groups:
		if group.name == agent.behavior:
			if not is_closed or group.fits(agent):
				_refer(group, agent)
				return group
			fault("the agents of behavior '%s' do not all have the same sizes" % group.name, agent)
			return null
	if is_closed:
		fault("behavior '%s' is new; name a scene with it in the arena's `joins`" % agent.behavior, agent)
		return null
	var group := Group.new(agent, groups.size())
	groups.append(group)
	_refer(group, agent)
	return group


func _refer(group: Group, agent: Node) -> void:
	var wrong := "" if is_closed else group.refer(agent)
	if wrong != "":
		fault("behavior '%s' %s" % [group.name, wrong], null)


func specs() -> Dictionary:
	var behaviors := []
	var most := {}
	var settings := {}
	for group in groups:
		behaviors.append(group.specs())
		most[group.name] = group.max_agents
		if group.settings != null:
			settings[group.name] = group.declared
	var declared := {"behaviors": settings, "training": training}
	return {"behaviors": behaviors, "max_agents": most, "declared": declared, "begins_on_demand": true}


## Checks the declarations themselves, before anybody plays.
func check_specs() -> void:
	if groups.is_empty() and faults.is_empty():
		fault("the game has no agents: give the arena sizes, or put agents into its scene", null)
	for group in groups:
		var wrong := group.what_is_wrong()
		if wrong != "":
			fault("behavior '%s' %s" % [group.name, wrong], null)


## Keeps what an agent saw last in its episode, which ends with `bits`.
func close_episode(agent: Node, bits: int) -> void:
	agent._bits = bits
	agent._group.some_ended = true
	if agent._final == null:  # else a predecessor in the old scene has seen it
		agent._final = _seen_by(agent)
		agent._info = agent.info() if with_infos else null


## Keeps the infos of the step taken, before new episodes begin.
func keep_infos() -> void:
	for group in groups:
		for agent in group.agents:
			if agent._final == null:
				agent._info = agent.info()


## Takes an agent out; its last row goes with the next steps.
func remove(agent: Node, bits: int) -> void:
	var group: Group = agent._group
	if _is_looking:
		fault("an agent left while others observed: observe() only looks", agent, "observe")
	if agent._copy.rests:  # its episode has ended before
		group.agents.erase(agent)
		group.changed = true
		return
	if agent._final == null:
		close_episode(agent, bits if agent._bits == 0 else agent._bits)
	var row := {"arena": agent._copy.index, "k": agent._k, "reward": agent.reward, "bits": agent._bits}
	row["final"] = agent._final
	row["info"] = agent._info
	group.agents.erase(agent)
	group.leavers.append(row)
	group.changed = true


## Has an agent of a new scene go on for one that has left with the old scene: its number, its reward, its end.
func succeed(agent: Node) -> void:
	var leavers: Array = agent._group.leavers
	for i in range(leavers.size() - 1, -1, -1):  # agents leave in the reverse order of the tree
		var row: Dictionary = leavers[i]
		if row.arena == agent._copy.index:
			agent._k = row.k
			agent.reward = row.reward
			agent._bits = row.bits
			agent._final = row.final
			agent._info = row.info
			leavers.remove_at(i)
			return


## Other rows come with the next steps.
func note_change() -> void:
	for group in groups:
		group.changed = true


## Drops what was not sent of episodes that nobody will hear of, because a reset cuts them.
func forget_leavers() -> void:
	for group in groups:
		group.leavers = []
		group.changed = true


## Writes the sections of a steps frame, and its infos: of all agents, or of those of some copies (by index).
func write(out: PackedByteArray, only: Dictionary) -> void:
	var count_at := out.size()
	var sections := 0
	out.resize(count_at + 4)
	_infos = {}
	for group in groups:
		var rows := group.rows(only)
		group.acting = []
		if rows.is_empty() and group.leavers.is_empty():
			continue
		if rows.size() > group.max_agents:
			fault("%d agents of behavior '%s', max_agents allows %d" % [rows.size(), group.name, group.max_agents], null)
		_is_looking = true
		_write_section(group, rows, out)
		_is_looking = false
		group.changed = not (group.leavers.is_empty() and only.is_empty())
		group.leavers = []
		sections += 1
	out.encode_u32(count_at, sections)
	var text := PackedByteArray() if _infos.is_empty() else JSON.stringify(Wire.plain(_infos)).to_utf8_buffer()
	out.append_array(PackedInt32Array([text.size()]).to_byte_array())
	Wire.append_block(out, text)


## Does the actions of a step request. The behaviors without a section play alone.
func act(body: PackedByteArray) -> void:
	var at := 4
	var led := {}  # group -> where its actions begin
	for _section in body.decode_u32(0):
		var number := body.decode_u16(at)
		var n := body.decode_u32(at + 4)
		if number >= groups.size() or n != groups[number].acting.size():
			fault("the step has %d rows for behavior %d; another number of its agents wants actions" % [n, number], null)
			return
		led[groups[number]] = at + 8
		at += 8 + 4 * n * (groups[number].continuous_size + groups[number].discrete_choices.size())
	if at != body.size():
		fault("the step has %d bytes, its sections have %d" % [body.size(), at], null)
		return
	var others := []
	for group in groups:
		if not led.has(group):
			others.append(group)
	var decided := _decided(others)
	for group in led:
		_act_group(group, body, led[group])
	_play_alone(others, decided)


## Has all agents act by their policies, or by heuristic().
func play_alone() -> void:
	_play_alone(groups, _decided(groups))


## The ticks of an action when nobody trains: as many as the policies were trained with.
func ticks_alone() -> int:
	var ticks := 0
	for policy in _policies.values():
		if ticks != 0 and not policy.ticks in [0, ticks]:
			fault(TWO_RHYTHMS % [ticks, policy.ticks], null)
		ticks = ticks if ticks != 0 else policy.ticks
	return ticks if ticks != 0 else TICKS_ALONE


## Why an agent cannot act by the policy that it names, or "".
func misfit(agent: Node) -> String:
	var path: String = agent.policy
	var group: Group = agent._group
	if path != "" and not group.misfits.has(path):
		if not _policies.has(path):
			_policies[path] = Policy.new(path)
		var policy: Policy = _policies[path]
		var wrong := policy.problem
		if wrong == "":
			wrong = policy.misfit(group.sizes, group.continuous_size, group.discrete_choices)
		group.misfits[path] = "" if wrong == "" else "the policy %s %s" % [path, wrong]
	return group.misfits.get(path, "")


# What the policies of these groups' agents decide: agent -> [continuous, discrete], or null after a fault. All observe
# before any of them acts, as in a training.
func _decided(of_groups: Array) -> Dictionary:
	var decided := {}
	_is_looking = true
	for group in of_groups:
		for agent in group.acting:
			if not is_instance_valid(agent) or agent._k < 0 or agent.policy == "":
				continue
			var wrong := misfit(agent)
			if wrong != "":
				fault(wrong, agent)
			var seen = _seen_by(agent) if wrong == "" else null
			decided[agent] = null if seen == null else _policies[agent.policy].decide(seen)
	_is_looking = false
	return decided


func _play_alone(of_groups: Array, decided: Dictionary) -> void:
	for group in of_groups:
		for agent in group.acting:
			if not is_instance_valid(agent) or agent._k < 0:
				continue
			if not decided.has(agent):
				agent.heuristic()
			elif decided[agent] != null:
				agent.act(decided[agent][0], decided[agent][1])


func fault(message: String, agent: Node, function = null) -> void:
	var error := {"message": message, "script": null, "line": null, "function": function, "arena": null}
	if agent != null:
		var script: Script = agent.get_script()
		error["script"] = script.resource_path
		while function != null and error["line"] == null and script.get_base_script() != null:  # agent.gd is the last
			var at := script.source_code.find("func %s(" % function)
			if at >= 0:
				error["script"] = script.resource_path
				error["line"] = script.source_code.left(at).split("\n").size()
			script = script.get_base_script()
		error["message"] = "%s (node %s)" % [message, agent.name]
		if agent._copy != null:
			error["arena"] = agent._copy.index
	if faults.size() < 16:
		faults.append(error)


# What an agent sees: one packed array for each of its observations; null and a fault when they do not fit.
func _seen_by(agent: Node):
	var group: Group = agent._group
	var seen = agent.observe()
	var parts = [seen] if group.sizes.size() == 1 else seen
	var wrong := group.what_is_wrong_with(parts)
	if wrong == "":
		return parts
	fault("observe() returned " + wrong, agent, "observe")
	return null


func _write_section(group: Group, rows: Array, out: PackedByteArray) -> void:
	var rewards := PackedFloat32Array()
	var bits := PackedByteArray()
	var finals := []
	var all_act := true
	for agent in rows:
		all_act = all_act and agent.wants_action
		rewards.append(agent.reward)
		agent.reward = 0.0
	group.acting = rows.duplicate() if all_act else rows.filter(func(agent: Node) -> bool: return agent.wants_action)
	if group.some_ended:
		group.acting = group.acting.filter(func(agent: Node) -> bool: return not agent._copy.rests)
	if group.some_ended or not all_act:
		_write_bits(rows, bits, finals)
		group.some_ended = false
	else:
		bits.resize(rows.size())
		bits.fill(ACTING)
	for leaver in group.leavers:
		bits.append(leaver.bits)
		rewards.append(leaver.reward)
		finals.append(leaver.final)
	var flags := 0 if group.changed else SAME
	flags |= SOME_ENDED if not finals.is_empty() else 0
	flags |= ALL_ACT if group.acting.size() == bits.size() else 0
	out.append_array(PackedInt32Array([group.number | flags << 16, bits.size()]).to_byte_array())
	if group.changed:
		out.append_array(group.ids(rows))
	_write_observations(group, rows, out)
	out.append_array(rewards.to_byte_array())
	Wire.append_block(out, bits)
	if not finals.is_empty():
		_write_parts(group, finals, out)
	if with_infos:
		_add_infos(group, rows, bits)


func _write_bits(rows: Array, bits: PackedByteArray, finals: Array) -> void:
	for agent in rows:
		if agent._bits != 0:
			finals.append(agent._final)
		bits.append(agent._bits | (ACTING if agent.wants_action and not agent._copy.rests else 0))
		agent._bits = 0
		agent._final = null


func _write_observations(group: Group, rows: Array, out: PackedByteArray) -> void:
	if group.is_one_float_array:
		_write_floats(group, rows, out)
		return
	var all := []
	for agent in rows:
		all.append(_seen_by(agent))
	for leaver in group.leavers:
		all.append(leaver.final)
	_write_parts(group, all, out)


# The same for the commonest case, faster.
func _write_floats(group: Group, rows: Array, out: PackedByteArray) -> void:
	var size: int = group.sizes[0]
	var numbers := PackedFloat32Array()
	for agent in rows:
		var seen = agent.observe()
		if typeof(seen) != TYPE_PACKED_FLOAT32_ARRAY or seen.size() != size:
			fault("observe() returned " + group.what_is_wrong_with([seen]), agent, "observe")
			return
		numbers.append_array(seen)
	for leaver in group.leavers:
		if leaver.final != null:
			numbers.append_array(leaver.final[0])
	out.append_array(numbers.to_byte_array())


func _write_parts(group: Group, all: Array, out: PackedByteArray) -> void:
	if all.has(null):
		return  # there is a fault already, and no steps will be sent
	for i in group.sizes.size():
		var block := PackedByteArray()
		for parts in all:
			block.append_array(parts[i] if group.types[i] == TYPE_PACKED_BYTE_ARRAY else parts[i].to_byte_array())
		Wire.append_block(out, block)


# info: of each row; reset_info: of each that ended, what its next episode begins with.
func _add_infos(group: Group, rows: Array, bits: PackedByteArray) -> void:
	var info := []
	var reset_info := []
	for i in rows.size():
		info.append(rows[i]._info if rows[i]._info is Dictionary else null)
		if bits[i] & ~ACTING:
			var about = rows[i].info()
			reset_info.append(about if about is Dictionary else null)
	for leaver in group.leavers:
		info.append(leaver.info if leaver.info is Dictionary else null)
		reset_info.append(null)
	_infos[group.name] = {"info": info}
	if not reset_info.is_empty():
		_infos[group.name]["reset_info"] = reset_info


func _act_group(group: Group, body: PackedByteArray, from: int) -> void:
	var n := group.acting.size()
	var width := group.continuous_size
	var choices := group.discrete_choices.size()
	var middle := from + 4 * n * width
	var end := middle + 4 * n * choices
	var continuous := body.slice(from, middle).to_float32_array()
	var discrete := body.slice(middle, end).to_int32_array()
	var moves := continuous if n == 1 else PackedFloat32Array()
	var chosen := discrete if n == 1 else PackedInt32Array()
	var i := 0
	for agent in group.acting:
		if n > 1 and width > 0:
			moves = continuous.slice(i * width, (i + 1) * width)
		if n > 1 and choices > 0:
			chosen = discrete.slice(i * choices, (i + 1) * choices)
		i += 1
		# An act() before may have made it leave; then the rows have changed.
		if not group.changed or (is_instance_valid(agent) and agent._k >= 0):
			agent.act(moves, chosen)
