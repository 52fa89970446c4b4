extends Reference
# Who plays: the agents of each behavior, and their rows in the frames.
#
# User code is called from here. After a script error it returns null, so nothing it returns is trusted: what is wrong
# becomes a fault, and the trainer gets that instead of the steps.

const Wire = preload("res://addons/envmanager/wire.gd")
const Group = preload("res://addons/envmanager/group.gd")
const Policy = preload("res://addons/envmanager/policy.gd")
const SAME = 1
const SOME_ENDED = 2
const ALL_ACT = 4
const ACTING = 4
const TICKS_ALONE = 4  # per action, when nobody trains and no policy says how many its training had
const TWO_RHYTHMS = "a policy was trained with %d ticks per action and another with %d; in one game all must have the same"

var groups: Array = []
var faults: Array = []
var is_closed: bool = false  # the specs are with the trainer
var with_infos: bool = false
var training = null  # what the arena declares
var _policies: Dictionary = {}  # path -> Policy; agents with the same path share it
var _infos: Dictionary = {}  # of the frame that is being made
var _is_looking: bool = false


# The group of an agent; null and a fault when it fits none.
func group_of(agent: Node):
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
	var group = Group.new(agent, groups.size())
	groups.append(group)
	_refer(group, agent)
	return group


func _refer(group: Group, agent: Node) -> void:
	var wrong = "" if is_closed else group.refer(agent)
	if wrong != "":
		fault("behavior '%s' %s" % [group.name, wrong], null)


func specs() -> Dictionary:
	var behaviors = []
	var most = {}
	var settings = {}
	for group in groups:
		behaviors.append(group.specs())
		most[group.name] = group.max_agents
		if group.settings != null:
			settings[group.name] = group.declared
	var declared = {"behaviors": settings, "training": training}
	return {"behaviors": behaviors, "max_agents": most, "declared": declared, "begins_on_demand": true}


# Checks the declarations themselves, before anybody plays.
func check_specs() -> void:
	if groups.empty() and faults.empty():
		fault("the game has no agents: give the arena sizes, or put agents into its scene", null)
	for group in groups:
		var wrong = group.what_is_wrong()
		if wrong != "":
			fault("behavior '%s' %s" % [group.name, wrong], null)


# Keeps what an agent saw last in its episode, which ends with `bits`.
func close_episode(agent: Node, bits: int) -> void:
	agent._bits = bits
	if agent._final == null:  # else a predecessor in the old scene has seen it
		agent._final = _seen_by(agent)
		agent._info = agent.info() if with_infos else null


# Keeps the infos of the step taken, before new episodes begin.
func keep_infos() -> void:
	for group in groups:
		for agent in group.agents:
			if agent._final == null:
				agent._info = agent.info()


# Takes an agent out; its last row goes with the next steps.
func remove(agent: Node, bits: int) -> void:
	var group = agent._group
	if _is_looking:
		fault("an agent left while others observed: observe() only looks", agent, "observe")
	if agent._copy.rests:  # its episode has ended before
		group.agents.erase(agent)
		group.changed = true
		return
	if agent._final == null:
		close_episode(agent, bits if agent._bits == 0 else agent._bits)
	var row = {"arena": agent._copy.index, "k": agent._k, "reward": agent.reward, "bits": agent._bits}
	row["final"] = agent._final
	row["info"] = agent._info
	group.agents.erase(agent)
	group.leavers.append(row)
	group.changed = true


# Has an agent of a new scene go on for one that has left with the old scene: its number, its reward, its end.
func succeed(agent: Node) -> void:
	var leavers = agent._group.leavers
	for i in range(leavers.size() - 1, -1, -1):  # agents leave in the reverse order of the tree
		var row = leavers[i]
		if row.arena == agent._copy.index:
			agent._k = row.k
			agent.reward = row.reward
			agent._bits = row.bits
			agent._final = row.final
			agent._info = row.info
			leavers.remove(i)
			return


# Other rows come with the next steps.
func note_change() -> void:
	for group in groups:
		group.changed = true


# Drops what was not sent of episodes that nobody will hear of, because a reset cuts them.
func forget_leavers() -> void:
	for group in groups:
		group.leavers = []
		group.changed = true


# The sections of a steps frame, and its infos: of all agents, or of those of some copies (by index).
func written(only: Dictionary) -> PoolByteArray:
	var sections = 0
	var out = PoolByteArray()
	_infos = {}
	for group in groups:
		var rows = group.rows(only)
		group.acting = []
		if rows.empty() and group.leavers.empty():
			continue
		if rows.size() > group.max_agents:
			fault("%d agents of behavior '%s', max_agents allows %d" % [rows.size(), group.name, group.max_agents], null)
		_is_looking = true
		out.append_array(_section(group, rows))
		_is_looking = false
		group.changed = not (group.leavers.empty() and only.empty())
		group.leavers = []
		sections += 1
	var text = PoolByteArray() if _infos.empty() else JSON.print(Wire.plain(_infos)).to_utf8()
	var all = Wire.int_bytes(PoolIntArray([sections]))
	all.append_array(out)
	all.append_array(Wire.int_bytes(PoolIntArray([text.size()])))
	all.append_array(Wire.padded(text))
	return all


# Does the actions of a step request. The behaviors without a section play alone.
func act(body: PoolByteArray) -> void:
	var ints = Wire.to_ints(body)
	var at = 1  # in units of 4 bytes
	var led = {}  # group -> where its actions begin
	for _section in ints[0]:
		var number = ints[at] & 0xFFFF
		var n = ints[at + 1]
		if number >= groups.size() or n != groups[number].acting.size():
			fault("the step has %d rows for behavior %d; another number of its agents wants actions" % [n, number], null)
			return
		led[groups[number]] = at + 2
		at += 2 + n * (groups[number].continuous_size + groups[number].discrete_choices.size())
	if 4 * at != body.size():
		fault("the step has %d bytes, its sections have %d" % [body.size(), 4 * at], null)
		return
	var others = []
	for group in groups:
		if not led.has(group):
			others.append(group)
	var decided = _decided(others)
	for group in led:
		_act_group(group, body, led[group])
	_play_alone(others, decided)


# Has all agents act by their policies, or by heuristic().
func play_alone() -> void:
	_play_alone(groups, _decided(groups))


# The ticks of an action when nobody trains: as many as the policies were trained with.
func ticks_alone() -> int:
	var ticks = 0
	for policy in _policies.values():
		if ticks != 0 and not policy.ticks in [0, ticks]:
			fault(TWO_RHYTHMS % [ticks, policy.ticks], null)
		ticks = ticks if ticks != 0 else policy.ticks
	return ticks if ticks != 0 else TICKS_ALONE


# Why an agent cannot act by the policy that it names, or "".
func misfit(agent: Node) -> String:
	var path = agent.policy
	var group = agent._group
	if path != "" and not group.misfits.has(path):
		if not _policies.has(path):
			_policies[path] = Policy.new(path)
		var policy = _policies[path]
		var choices = Array(group.discrete_choices)
		var wrong = policy.problem if policy.problem != "" else policy.misfit(group.sizes, group.continuous_size, choices)
		group.misfits[path] = "" if wrong == "" else "the policy %s %s" % [path, wrong]
	return group.misfits.get(path, "")


# What the policies of these groups' agents decide: agent -> [continuous, discrete], or null after a fault. All observe
# before any of them acts, as in a training.
func _decided(of_groups: Array) -> Dictionary:
	var decided = {}
	_is_looking = true
	for group in of_groups:
		for agent in group.acting:
			if not is_instance_valid(agent) or agent._k < 0 or agent.policy == "":
				continue
			var wrong = misfit(agent)
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
	var error = {"message": message, "script": null, "line": null, "function": function, "arena": null}
	if agent != null:
		var script = agent.get_script()
		error["script"] = script.resource_path
		while function != null and error["line"] == null and script.get_base_script() != null:  # agent.gd is the last
			var at = script.source_code.find("func %s(" % function)
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
	var group = agent._group
	var seen = agent.observe()
	var parts = [seen] if group.sizes.size() == 1 else seen
	var wrong = group.what_is_wrong_with(parts)
	if wrong == "":
		return parts
	fault("observe() returned " + wrong, agent, "observe")
	return null


func _section(group, rows: Array) -> PoolByteArray:
	var rewards = PoolRealArray()
	var bits = PoolByteArray()
	var finals = []
	var acting = group.acting
	for agent in rows:
		var bit = agent._bits
		if bit != 0:
			finals.append(agent._final)
			agent._bits = 0
			agent._final = null
		if agent.wants_action and not agent._copy.rests:
			bit |= ACTING
			acting.append(agent)
		bits.append(bit)
		rewards.append(agent.reward)
		agent.reward = 0.0
	for leaver in group.leavers:
		bits.append(leaver.bits)
		rewards.append(leaver.reward)
		finals.append(leaver.final)
	var flags = 0 if group.changed else SAME
	flags |= SOME_ENDED if not finals.empty() else 0
	flags |= ALL_ACT if acting.size() == bits.size() else 0
	var out = Wire.int_bytes(PoolIntArray([group.number | flags << 16, bits.size()]))
	if group.changed:
		out.append_array(group.ids(rows))
	out.append_array(_observed(group, rows))
	out.append_array(Wire.float_bytes(rewards))
	out.append_array(Wire.padded(bits))
	if not finals.empty():
		out.append_array(_joined(group, finals))
	if with_infos:
		_add_infos(group, rows, bits)
	return out


func _observed(group, rows: Array) -> PoolByteArray:
	if group.is_one_float_array:
		return _observed_floats(group, rows)
	var all = []
	for agent in rows:
		all.append(_seen_by(agent))
	for leaver in group.leavers:
		all.append(leaver.final)
	return _joined(group, all)


# The same for the commonest case, faster.
func _observed_floats(group, rows: Array) -> PoolByteArray:
	var size = group.sizes[0]
	var numbers = PoolRealArray()
	for agent in rows:
		var seen = agent.observe()
		if typeof(seen) != TYPE_REAL_ARRAY or seen.size() != size:
			fault("observe() returned " + group.what_is_wrong_with([seen]), agent, "observe")
			return PoolByteArray()
		numbers.append_array(seen)
	for leaver in group.leavers:
		if leaver.final != null:
			numbers.append_array(leaver.final[0])
	return Wire.float_bytes(numbers)


func _joined(group, all: Array) -> PoolByteArray:
	var out = PoolByteArray()
	if all.has(null):
		return out  # there is a fault already, and no steps will be sent
	for i in group.sizes.size():
		var block = PoolByteArray()
		for parts in all:
			block.append_array(Wire.bytes_of(parts[i]))
		out.append_array(Wire.padded(block))
	return out


# info: of each row; reset_info: of each that ended, what its next episode begins with.
func _add_infos(group, rows: Array, bits: PoolByteArray) -> void:
	var info = []
	var reset_info = []
	for i in rows.size():
		info.append(rows[i]._info if rows[i]._info is Dictionary else null)
		if bits[i] & ~ACTING:
			var about = rows[i].info()
			reset_info.append(about if about is Dictionary else null)
	for leaver in group.leavers:
		info.append(leaver.info if leaver.info is Dictionary else null)
		reset_info.append(null)
	_infos[group.name] = {"info": info}
	if not reset_info.empty():
		_infos[group.name]["reset_info"] = reset_info


func _act_group(group, body: PoolByteArray, from: int) -> void:
	var n = group.acting.size()
	var width = group.continuous_size
	var choices = group.discrete_choices.size()
	var middle = from + n * width
	var end = middle + n * choices
	var continuous = Wire.to_floats(Wire.part(body, 4 * from, 4 * middle))
	var discrete = Wire.to_ints(Wire.part(body, 4 * middle, 4 * end))
	for i in n:
		var agent = group.acting[i]
		if not is_instance_valid(agent) or agent._k < 0:  # an act() before may have made it leave
			continue
		var numbers = PoolRealArray()
		for j in range(i * width, (i + 1) * width):
			numbers.append(continuous[j])
		var chosen = PoolIntArray()
		for j in range(i * choices, (i + 1) * choices):
			chosen.append(discrete[j])
		agent.act(numbers, chosen)
